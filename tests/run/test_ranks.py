"""Two processes that train one model, over gloo on loopback: gamma, lambda and u stay the same in both."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_processes import free_port
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from toy import ADAPTERS, Layered, LayeredAdapter

from ace_plugins import AceError, attach, status
from ace_plugins.adapter import Site, Tap, hookimpl, norm_linear
from ace_plugins.plugins.registry import registry

FIT: dict[str, Any] = {"preset": "fit", "loop": "paced", "frames": "off", "trace": False}
STEPS = 100


class Normed(LayeredAdapter):
    """Branches with batch normalisation: upstream has no buffers, the attached model has."""

    @hookimpl
    def ace_branch(self, site: Any) -> nn.Module:
        return norm_linear(site) if isinstance(site, Site) else nn.Linear(3, 8)


class ReadingX(LayeredAdapter):
    """Branches that read the vectors themselves, so that they can break the symmetry."""

    @hookimpl
    def ace_layers(self, model: Any) -> Any:
        return [Site(f"layers.{i}", shape_in=(3,), shape_out=(8,), reads=Tap("x", "")) for i in range(3)]


MORE = {"normed": Normed, "layered_x": ReadingX}


def made(**config: Any) -> Any:
    torch.manual_seed(0)
    return attach(Layered().double(), "normed", **config)


def batch(steps: int) -> torch.Tensor:
    return torch.randn(steps, 16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def train(forward: Any, model: Any, batches: Any, **hooks: Callable[[int], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(batches):
        for hook in hooks.values():
            hook(step)
        optimizer.zero_grad()
        (forward(x) - 1).square().mean().backward()
        optimizer.step()


def values(model: Any) -> torch.Tensor:
    return model.ace.duals.snapshot(model.ace.gamma)


def process(rank: int, port: int, folder: str, job: Callable[[int, str], Any]) -> None:
    torch.set_num_threads(1)
    for name, adapter in {**ADAPTERS, **MORE}.items():
        registry().add(adapter(), name)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACE_TRACE="0", ACE_QUIET="1")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.save(job(rank, folder), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a process on its way out, and what it was for is on the disk


def both(job: Callable[[int, str], Any], tmp_path: Path) -> tuple[Any, Any]:
    torch.multiprocessing.spawn(process, args=(free_port(), str(tmp_path), job), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    return one, two


@pytest.fixture(autouse=True)
def _normed() -> Any:
    for name, adapter in MORE.items():
        registry().add(adapter(), name)
    yield
    for name in MORE:
        registry().remove(name)


def epochs_on_the_first(rank: int, folder: str) -> Any:
    """Twenty epochs of five steps; only the first process evaluates, through the wrapper, and knows of epochs."""
    model = made(**FIT, mode="resilient", budget="20 epochs")
    wrapped = DistributedDataParallel(model)

    def evaluate(step: int) -> None:
        if rank == 0 and step % 5 == 0:
            wrapped.eval()
            wrapped(batch(1)[0])
            wrapped.train()

    train(wrapped, model, [x[rank::2] for x in batch(STEPS)], evaluate=evaluate)
    return values(model), model.ace.budget.total


def test_only_the_first_process_evaluates(tmp_path: Path) -> None:
    one, two = both(epochs_on_the_first, tmp_path)
    assert one[1] == two[1] == 100
    assert torch.equal(one[0], two[0])
    assert (one[0][0] != 0.1).all(), "gamma has moved"


def loaded_by_the_first(rank: int, folder: str) -> Any:
    torch.manual_seed(rank)
    model = attach(Layered().double(), "normed", preset="none", land_at=150, dual_lr=0.01, trace=False)
    if rank == 0:
        model.load_state_dict(torch.load(f"{folder}/saved.pt"))
    train(DistributedDataParallel(model), model, [x[rank::2] for x in batch(STEPS)])
    return values(model), status(model).steps, status(model).landed


def test_only_the_first_process_loads_a_checkpoint(tmp_path: Path) -> None:
    model = made(preset="none", land_at=150, dual_lr=0.01, trace=False)
    train(model, model, batch(60))
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    one, two = both(loaded_by_the_first, tmp_path)
    assert one[1:] == two[1:] == (160, True), "steps after the landing count"
    assert torch.equal(one[0], two[0])
    assert one[0][0].tolist() == [0, 0, 0]


def plainly(rank: int, folder: str) -> Any:
    model = copy.deepcopy(torch.load(f"{folder}/model.pt", weights_only=False))
    train(DistributedDataParallel(model), model, [x[rank::2] for x in batch(STEPS)])
    return values(model)


@pytest.mark.parametrize(
    "config",
    [{"preset": "none", "mode": "resilient", "dual_lr": 0.05}, {**FIT, "budget": 150}, {**FIT, "mode": "bounded"}],
    ids=["paper", "auto", "bounded"],
)
def test_two_processes_are_one_on_the_joined_batch(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # No batch normalisation here: its statistics are those of each process's own batch.
    model = attach(Layered().double(), "layered", **{**config, "trace": False, "spectral_norm": True})
    torch.save(model, tmp_path / "model.pt")
    train(model, model, batch(STEPS))
    one, two = both(plainly, tmp_path)
    assert torch.equal(one, two)
    assert torch.allclose(one, values(model), atol=1e-5)


def decide(forward: Any, model: Any, batches: Any) -> Any:
    """Learn a target that breaks the symmetry, and return gamma, the sums of the test and the sites it keeps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x in batches:
        optimizer.zero_grad()
        (forward(x) - x[:, 2:]).square().mean().backward()
        optimizer.step()
    evidence = model.ace.duals.evidence
    sums = torch.stack([evidence.total, evidence.square, evidence.probes, evidence.kept])
    return values(model), sums, sorted(evidence.kept_sites), sorted(model.ace.duals.landed_sites)


def decided(rank: int, folder: str) -> Any:
    model = torch.load(f"{folder}/model.pt", weights_only=False)
    return decide(DistributedDataParallel(model), model, [x[rank::2] for x in batch(300)])


def test_two_processes_decide_as_one_on_the_joined_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = attach(Layered().double(), "layered_x", **{**FIT, "mode": "auto", "budget": 300})
    torch.save(model, tmp_path / "model.pt")
    alone = decide(model, model, batch(300))
    one, two = both(decided, tmp_path)
    assert one[2:] == two[2:] == alone[2:]
    assert alone[2], "the target breaks the symmetry"
    assert len(alone[2]) + len(alone[3]) == 3, "all sites are decided"
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    # The gradients of two half batches add up to that of the whole batch except for the rounding of the sum.
    assert torch.allclose(one[0], alone[0], rtol=1e-9, atol=1e-9)
    assert torch.allclose(one[1], alone[1], rtol=1e-9, atol=1e-9)


def sharded(rank: int, folder: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = torch.load(f"{folder}/model.pt", weights_only=False)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(model.ace.parameters()))
    train(model, model, [x[rank::2] for x in batch(STEPS)])
    return values(model), type(model.head.weight).__name__


@pytest.mark.parametrize(
    "config",
    [{"preset": "none", "mode": "resilient", "dual_lr": 0.05}, {**FIT, "mode": "resilient", "budget": 150}],
    ids=["paper", "paced"],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_sharded_with_ace_whole(config: Any, tmp_path: Path) -> None:
    """``fully_shard``, known as FSDP2."""
    torch.manual_seed(0)
    model = attach(Layered().double(), "layered", **{**config, "trace": False, "spectral_norm": True})
    torch.save(model, tmp_path / "model.pt")
    train(model, model, batch(STEPS))
    one, two = both(sharded, tmp_path)
    assert one[1] == "DTensor"
    assert torch.equal(one[0], two[0])
    assert torch.allclose(one[0], values(model), atol=1e-5)


def sharded_all(rank: int, folder: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    told = []
    model = made(**FIT)
    try:
        FullyShardedDataParallel(model)
    except AceError as error:
        told.append(str(error))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    try:
        train(model, model, batch(1))
    except AceError as error:
        told.append(str(error))
    return told


def test_what_takes_gamma_apart_is_refused(tmp_path: Path) -> None:
    one, two = both(sharded_all, tmp_path)
    assert one == two
    flat, whole = one
    assert "FullyShardedDataParallel shards gamma" in flat
    assert "fully_shard has sharded ACE's parameters" in whole
    for told in one:
        assert "fully_shard(model, ignored_params=set(model.ace.parameters()))" in told
        assert "\n" not in told


def uneven(rank: int, folder: str) -> Any:
    model = made(**FIT)
    wrapped = DistributedDataParallel(model)
    try:
        with Join([wrapped]):
            train(wrapped, model, batch(5 + rank))
    except AceError as error:
        return str(error)
    return ""


def test_join_is_refused(tmp_path: Path) -> None:
    one, two = both(uneven, tmp_path)
    assert one == two
    assert "Join lets ranks make different numbers of steps" in one
    assert "the same number of batches" in one
    assert "\n" not in one
