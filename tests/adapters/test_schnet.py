"""The SchNet adapter on the real torch_geometric.nn.SchNet."""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install torch-geometric")

from torch_geometric.nn import SchNet
from torch_geometric.nn.models import schnet as upstream

from ace_plugins import AceError, attach, equivariance_error, patched, project, status
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import parametrize_with_checks
from ace_schnet import shims
from ace_schnet.neighbours import RadiusGraph


def paper() -> SchNet:
    return SchNet(hidden_channels=64, num_filters=64, num_interactions=6, num_gaussians=50)


def small(**options: Any) -> SchNet:
    return SchNet(16, 16, 2, 10, interaction_graph=RadiusGraph(10.0), **options)


def molecules(count: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    batch = torch.arange(count).repeat_interleave(9)
    z = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, batch.shape, generator=made)]
    return z, 2 * torch.randn(len(batch), 3, generator=made), batch


@parametrize_with_checks("schnet")
def test_contract(check: Any) -> None:
    check()


def test_parameter_counts_of_the_paper() -> None:
    model = paper()
    assert sum(p.numel() for p in model.parameters()) == 127_553
    attach(model)
    assert sum(p.numel() for p in model.parameters()) == 153_543
    now = status(model)
    assert (len(now.sites), now.stem_parameters, now.sites[0].branch_parameters) == (6, 256, 4288)


def test_the_papers_forward_written_out() -> None:
    torch.manual_seed(0)
    model = attach(small(), preset="paper", gamma_init=0.7)
    with torch.no_grad():
        model.ace.gamma.copy_(torch.tensor([0.7, -0.3]))
    z, pos, batch = molecules()
    twin = copy.deepcopy(model)
    found = model(z, pos, batch)
    lift, *chain = (twin.ace.branch(name) for name in ("lift", "interactions.0", "interactions.1"))
    gammas = twin.ace.gamma.tolist()
    project(twin)
    edge_index, edge_weight = twin.interaction_graph(pos, batch)
    edge_attr = twin.distance_expansion(edge_weight)
    h, h_pos = twin.embedding(z), lift(pos)
    for interaction, link, gamma in zip(twin.interactions, chain, gammas, strict=True):
        h_pos = link(h_pos)
        h = h + interaction(h, edge_index, edge_weight, edge_attr) + gamma * h_pos
    expected = twin.readout(twin.lin2(twin.act(twin.lin1(h))), batch, dim=0)
    assert torch.allclose(found, expected, atol=1e-5)


def train(model: Any, steps: int) -> list[float]:
    """Train for 50 steps with a shuffled data loader."""
    data = torch.utils.data.TensorDataset(torch.arange(24))
    targets = torch.linspace(-1, 1, 24)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    while len(losses) < steps:
        for (chosen,) in loader:
            z, pos, batch = molecules(4, seed=int(chosen[0]))
            optimizer.zero_grad()
            loss = (model(z, pos, batch).view(-1) - targets[chosen]).abs().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]


def test_off_is_bit_identical_for_50_steps() -> None:
    torch.manual_seed(0)
    plain = small()
    expected = train(plain, 50)
    torch.manual_seed(0)
    with patched("schnet", mode="off"):
        model = small()
    assert train(model, 50) == expected
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))


def test_every_mode_leaves_upstreams_weights_and_the_shuffle_alone() -> None:
    torch.manual_seed(0)
    plain, after = small(), torch.randperm(24)
    for mode in ("strict", "bounded", "resilient"):
        torch.manual_seed(0)
        with patched("schnet", mode=mode):
            model = small()
        assert torch.equal(torch.randperm(24), after)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


RESUME = """
import sys, torch
sys.path.insert(0, {here!r})
from test_schnet import small, molecules
from ace_plugins import attach
begin, end, load, save = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.manual_seed(0)
model = attach(small(), mode={mode!r}, loop="paper", dual_optimizer="adam", dual_lr=0.01, gamma_lr=2.0, trace=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)
if load != "-":
    saved = torch.load(load)
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
for step in range(begin, end):
    optimizer.zero_grad()
    model(*molecules(2, seed=step)).square().mean().backward()
    optimizer.step()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, save)
"""


@pytest.mark.parametrize("mode", ["strict", "resilient"])
def test_stop_and_resume_in_a_fresh_process(mode: str, tmp_path: Path) -> None:
    code = RESUME.format(here=str(Path(__file__).parent), mode=mode)

    def run(*arguments: str) -> dict[str, Any]:
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=300)
        saved: dict[str, Any] = torch.load(arguments[-1])
        return saved

    whole = run("0", "200", "-", str(tmp_path / "whole.pt"))
    run("0", "100", "-", str(tmp_path / "half.pt"))
    resumed = run("100", "200", str(tmp_path / "half.pt"), str(tmp_path / "resumed.pt"))
    different = [n for n, v in whole["model"].items() if not torch.equal(v, resumed["model"][n])]
    assert not different
    assert int(resumed["model"]["ace.duals.steps"]) == 200
    assert resumed["model"]["ace.duals.lambda_"].abs().max() > 0.1


def test_a_plain_schnet_just_runs() -> None:
    """Uses PyG's neighbour search if it works, else the adapter's."""
    model = attach(paper().eval(), mode="strict")
    z, pos, batch = molecules()
    torch.manual_seed(0)
    ours = SchNet(64, 64, 6, 50, interaction_graph=RadiusGraph(10.0)).eval()
    with pytest.warns(match="checkpoint without ACE"):
        model.load_state_dict(ours.state_dict())
    assert torch.allclose(model(z, pos, batch), ours(z, pos, batch), atol=1e-5)
    assert torch.allclose(model(z[:9], pos[:9]), ours(z[:9], pos[:9]), atol=1e-5), "without a batch vector"


def test_the_shim_keeps_out_where_upstream_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "radius_graph", lambda x, r, batch: torch.zeros(2, 0, dtype=torch.long))
    assert not shims._is_needed()

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("'radius_graph' requires 'torch-cluster'")

    monkeypatch.setattr(upstream, "radius_graph", missing)
    assert shims._is_needed()
    shims._apply()
    assert upstream.radius_graph is shims.radius_graph


def test_at_most_max_num_neighbors() -> None:
    pos = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    edges = shims.radius_graph(pos, 10.0, max_num_neighbors=5)
    assert torch.equal(torch.bincount(edges[1]), torch.full((50,), 5))


def test_symmetry_is_broken_by_gamma_alone() -> None:
    model = attach(small(), mode="resilient").double()
    z, pos, batch = molecules()
    call = (z, pos.double(), batch)
    errors = []
    for gamma in (0.0, 0.1, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        errors.append(equivariance_error(model, call).absolute)
    assert errors[0] < 1e-10 < errors[1] < errors[2]


class OnData(SchNet):
    """A subclass with forward(data), as is common in PyG scripts."""

    def forward(self, data: Any) -> Tensor:
        out: Tensor = super().forward(data.z, data.pos, data.batch)
        return out


def test_subclasses_with_a_forward_of_their_own() -> None:
    from torch_geometric.data import Data

    z, pos, batch = molecules()
    with patched("schnet", mode="strict"):
        model = OnData(16, 16, 2, 10)
    data = Data(z=z, pos=pos, batch=batch)
    assert model.ace.action is None, "how the group acts on that argument is not known, so there are no frames"
    assert not torch.equal(model.train()(data), model.eval()(data))


def test_an_interaction_graph_that_is_a_function() -> None:
    graph = RadiusGraph(10.0)
    model = attach(SchNet(16, 16, 2, 10, interaction_graph=lambda pos, batch: graph(pos, batch)))
    assert not torch.equal(model.train()(*molecules()), model.eval()(*molecules()))


def test_shared_interactions_are_refused() -> None:
    model = small()
    model.interactions[1] = model.interactions[0]
    with pytest.raises(AceError, match="'interactions.0' and 'interactions.1' name the same submodule"):
        attach(model)


def test_a_single_atom_trains() -> None:
    model = attach(small())
    model(torch.tensor([6]), torch.zeros(1, 3)).sum().backward()
    assert torch.isfinite(model.ace.gamma.grad).all()


def test_a_schnet_without_interactions_has_no_site() -> None:
    with pytest.raises(AceError, match="adapter 'schnet' finds no site in .*schnet:SchNet"):
        attach(SchNet(16, 16, 0, 10))


def test_the_version_range_is_read_from_metadata() -> None:
    (needs,) = [r for r in registry().adapter("schnet").requires if r.upstream]
    assert needs.requirement.startswith("torch-geometric")
    assert needs.met


@pytest.mark.skipif("ACE_UPSTREAM_ACE" not in os.environ, reason="set ACE_UPSTREAM_ACE to a checkout of andreimano/ACE")
def test_equals_the_authors_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights in the authors' edited SchNet give the same outputs and the same gradient of gamma."""
    monkeypatch.syspath_prepend(str(Path(os.environ["ACE_UPSTREAM_ACE"]) / "SchNet"))
    import importlib

    fork = importlib.import_module("layers.schnet")
    args = argparse.Namespace(disable_equi=True, n_gammas="multiple")
    theirs = fork.SchNet(64, 64, 6, 50, interaction_graph=RadiusGraph(10.0), args=args)
    assert sum(p.numel() for p in theirs.parameters()) == 153_543
    ours = attach(SchNet(64, 64, 6, 50, interaction_graph=RadiusGraph(10.0)), preset="paper")
    state = {n: v for n, v in theirs.state_dict().items() if not n.startswith(("pos_", "gammas"))}
    with pytest.warns(match="checkpoint without ACE"):
        ours.load_state_dict(state)
    ours.ace.branch("lift").load_state_dict(theirs.pos_linear.state_dict())
    for i, link in enumerate(theirs.pos_interactions):
        ours.ace.branch(f"interactions.{i}").load_state_dict(link.state_dict(), strict=True)
    z, pos, batch = molecules()
    one, two = theirs(z, pos, batch, disable_equivariance=True), ours(z, pos, batch)
    assert torch.allclose(one, two, atol=1e-5)
    one.sum().backward()
    two.sum().backward()
    expected = torch.stack([gamma.grad for gamma in theirs.get_gammas()])
    assert torch.allclose(ours.ace.gamma.grad, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's own, of the compiler
def test_compiled_training_makes_its_graphs_once() -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    example = registry().adapter("schnet").example(0)
    model = attach(example.model, "schnet", preset="paper", trace=False)
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    graphs = []
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, twin)]
    for _ in range(4):
        for forward, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            forward(*example.args, **example.kwargs).square().mean().backward()
            optimizer.step()
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1
    for name in ("gamma", "duals.lambda_"):
        found, expected = (m.ace.state_dict()[name] for m in (model, twin))
        assert torch.allclose(found, expected, atol=1e-6), name
