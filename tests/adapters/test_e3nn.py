"""The adapter for models built of e3nn modules: on e3nn's networks and on a user's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn", reason="needs e3nn: pip install e3nn")
pytest.importorskip("ace_e3nn", reason="needs adapters/e3nn")

from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate, NormActivation
from e3nn.nn.models.v2106.gate_points_networks import NetworkForAGraphWithAttributes, SimpleNetwork

from ace_e3nn.actions import ByName
from ace_plugins import AceWarning, attach, audit, equivariance_error, project, status
from ace_plugins.adapter import (
    E3,
    AdapterError,
    GroupAction,
    Invariant,
    Irreps,
    Positions,
    Site,
    Upstream,
    Vectors,
    hookimpl,
)
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import parametrize_with_checks

# e3nn before 0.6 compiles its modules with TorchScript, which has something to say of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

SILENT: dict[str, Any] = {"trace": False, "tell": False}
HIDDEN = "4x0e+2x1o+2x2e"
HARMONICS = "0e+1o+2e"


class Convolution(nn.Module):
    """A typical layer: linear map, tensor product with weights from the distance, linear map, self-connection, gate."""

    def __init__(self, irreps_in: Any, attributes: str) -> None:
        super().__init__()
        self.gate = Gate("4x0e", [torch.nn.functional.silu], "4x0e", [torch.sigmoid], "2x1o+2x2e")
        self.linear_up = o3.Linear(irreps_in, irreps_in)
        self.product = o3.FullyConnectedTensorProduct(irreps_in, HARMONICS, HIDDEN, shared_weights=False)
        self.radial = FullyConnectedNet([4, 8, self.product.weight_numel], torch.nn.functional.silu)
        self.linear_down = o3.Linear(HIDDEN, self.gate.irreps_in)
        self.self_connection = o3.FullyConnectedTensorProduct(irreps_in, attributes, self.gate.irreps_in)
        self.irreps_out = self.gate.irreps_out

    def forward(self, x: Tensor, attributes: Tensor, edges: Tensor, harmonics: Tensor, radial: Tensor) -> Tensor:
        source, target = edges
        messages = self.product(self.linear_up(x)[source], harmonics, self.radial(radial))
        gathered = torch.zeros(len(x), messages.shape[1], dtype=x.dtype).index_add(0, target, messages)
        added: Tensor = self.gate(self.linear_down(gathered) + self.self_connection(x, attributes))
        return added


class Net(nn.Module):
    """A user's model: embedding, two gated convolutions, readout of an energy and a vector per molecule."""

    def __init__(self, irreps_out: str = "1x0e+1x1o") -> None:
        super().__init__()
        self.irreps_out = o3.Irreps(irreps_out)
        self.embedding = o3.Linear("3x0e", "4x0e")
        first = Convolution(o3.Irreps("4x0e"), "3x0e")
        self.convolutions = nn.ModuleList([first, Convolution(first.irreps_out, "3x0e")])
        self.readout = o3.Linear(first.irreps_out, self.irreps_out)

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        kinds = nn.functional.one_hot(z, 3).to(pos.dtype)
        edges = (batch[:, None] == batch).fill_diagonal_(False).nonzero().T
        along = pos[edges[0]] - pos[edges[1]]
        harmonics = o3.spherical_harmonics(HARMONICS, along, normalize=True, normalization="component")
        radial = along.norm(dim=1, keepdim=True) ** torch.arange(1, 5)
        x = self.embedding(kinds)
        for convolution in self.convolutions:
            x = convolution(x, kinds, edges, harmonics, (-radial).exp())
        read: Tensor = self.readout(x)
        return torch.zeros(int(batch.max()) + 1, read.shape[1], dtype=read.dtype).index_add(0, batch, read)


def molecules(count: int = 3, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    batch = torch.arange(count).repeat_interleave(size)
    z = torch.randint(3, batch.shape, generator=made)
    return z, torch.randn(len(batch), 3, generator=made, dtype=torch.float64), batch


@pytest.fixture
def double() -> Iterator[None]:
    """Build models in double precision. e3nn keeps constants in the default precision at construction."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def sites(model: nn.Module) -> list[Site]:
    found: list[Site] = registry().adapter("e3nn").call("ace_layers", model=model)
    return found


def names(*modules: tuple[str, nn.Module], **told: Any) -> list[str]:
    """Return the sites of a model with these submodules and attributes."""
    model = nn.Module()
    for name, module in modules:
        model.add_module(name, module)
    for name, value in told.items():
        setattr(model, name, value)
    return [site.name for site in sites(model)]


@parametrize_with_checks("e3nn")
def test_contract(check: Any) -> None:
    check()


def test_a_users_model_is_recognised_and_its_layers_are_sites() -> None:
    model = attach(Net(), **SILENT)
    assert model.ace.adapter == "e3nn"
    # The embedding has scalars alone, the maps before a gate are part of its layer.
    assert [site.name for site in status(model).sites] == ["convolutions.0.gate", "convolutions.1.gate", "readout"]
    gate, _, readout = model.ace.sites
    assert (gate.shape_in, gate.shape_out) == ((4 + 4 + 6 + 10,), (4 + 6 + 10,))
    assert gate.acts == (Irreps("8x0e+2x1o+2x2e"), Irreps(HIDDEN))
    assert readout.acts == (Irreps(HIDDEN), Irreps("1x0e+1x1o"))


def test_f_eq_is_symmetric_and_the_branches_break_it(double: None) -> None:
    model = attach(Net(), gamma_init=1.0, **SILENT)
    batch = molecules()
    assert equivariance_error(model, batch, branches_on=False).relative < 1e-12
    found = audit(model, batch, branches_on=True)
    assert found.relative > 1e-3
    assert {layer.name for layer in found.culprits} == {"convolutions.0.gate"}, "the first site is where it begins"


def test_forces_are_the_gradient_of_the_energy_and_sum_to_zero_with_branches(double: None) -> None:
    """Branches read features, so translations change nothing."""
    model = attach(Net("1x0e"), mode="resilient", spectral_norm=True, gamma_init=1.0, **SILENT).train()
    z, pos, batch = molecules()

    def energy(pos: Tensor) -> Tensor:
        return model(z, pos, batch).sum()  # type: ignore[no-any-return]

    where = pos.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(where), where, create_graph=True)
    h = 1e-5
    for atom, axis in ((0, 0), (5, 2), (11, 1)):
        moved = torch.zeros_like(pos)
        moved[atom, axis] = h
        with torch.no_grad():
            slope = (energy(pos + moved) - energy(pos - moved)) / (2 * h)
        assert abs(float(gradient[atom, axis].detach() - slope)) < 1e-6
    assert float(gradient.detach().sum(0).abs().max()) < 1e-12
    gradient.square().sum().backward()  # as a loss of forces does
    assert model.ace.gamma.grad.abs().min() > 0


@pytest.mark.parametrize("mode", ["strict", "resilient", "scheduled"])
def test_it_trains_and_comes_off_again(mode: str, double: None) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = attach(
        copy.deepcopy(plain), "e3nn", mode=mode, spectral_norm=mode == "resilient", budget=40, error_every=0, **SILENT
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch, losses = molecules(), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(*batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    if mode != "resilient":
        assert status(model).landed
        assert model.ace.gamma.abs().max() == 0
        project(model)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert equivariance_error(model, batch).relative < 1e-12


def test_networks_of_e3nn(double: None) -> None:
    model = NetworkForAGraphWithAttributes(
        "3x0e+2x1o",
        "4x0e+1x1o",
        "1e",
        "3x0o+1e",
        max_radius=3.0,
        num_neighbors=3.0,
        num_nodes=5.0,
        mul=2,
        layers=1,
        lmax=1,
    )
    assert [site.name for site in sites(model)] == ["mp.layers.0.second", "mp.layers.1.sc"]
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 3]])
    data = {
        "pos": torch.randn(5, 3),
        "edge_index": edges,
        "edge_src": edges[0],  # these two for e3nn 0.5.0
        "edge_dst": edges[1],
        "node_input": model.irreps_node_input.randn(5, -1),
        "node_attr": model.irreps_node_attr.randn(5, -1),
        "edge_attr": model.irreps_edge_attr.randn(5, -1),
    }
    attach(model, gamma_init=1.0, **SILENT)
    found = [audit(model, (data,), branches_on=on) for on in (False, True)]
    assert found[0].precision == "float64"
    assert found[0].relative < 1e-12 < 1e-3 < found[1].relative
    assert not found[0].uncovered


def test_a_pyg_graph_is_turned_by_its_names(double: None) -> None:
    data = pytest.importorskip("torch_geometric.data").Data
    model = attach(SimpleNetwork("2x0e", "1x1o", 3.0, 3.0, 5.0, mul=2, layers=1, lmax=1), **SILENT)
    graph = data(pos=torch.randn(6, 3), x=torch.randn(6, 2), y=torch.randn(1, 3), batch=torch.tensor([0] * 6))
    before = graph.pos.clone()
    assert equivariance_error(model, (graph,)).relative < 1e-12
    assert torch.equal(graph.pos, before)
    model.train()(graph).sum().backward()
    assert torch.isfinite(model.ace.gamma.grad).all()


def test_the_samples_of_a_batch_are_its_graphs() -> None:
    """Otherwise some nodes of a graph would train a branch, and others would judge it."""
    data = pytest.importorskip("torch_geometric.data").Data
    model = SimpleNetwork("2x0e", "1x1o", 3.0, 3.0, 5.0, mul=2, layers=1, lmax=1)
    action = registry().adapter("e3nn").call("ace_group_action", model=model)
    given = {"pos": torch.randn(6, 3), "x": torch.randn(6, 2), "y": torch.randn(2, 3)}
    batch = torch.tensor([0, 0, 0, 0, 1, 1])
    calls: list[tuple[list[str], tuple[Any, ...], dict[str, Any]]] = [
        (["data"], ({**given, "batch": batch},), {}),
        (["data"], (data(**given, batch=batch),), {}),
        (["pos", "x", "batch"], (given["pos"],), {"x": given["x"], "batch": batch}),
    ]
    for call in calls:
        rows, tensors = action.find_samples(*call)
        assert torch.equal(rows.nodes, batch)
        assert [tensor.shape for tensor in tensors] == [(6, 3), (6, 2)]
    assert action.find_samples(["data"], (given,), {}) == (None, [])


class Chained(Net):
    """One convolution is called twice, and one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions[0] = Convolution(o3.Irreps("4x0e"), "3x0e")
        self.convolutions.append(self.convolutions[1])
        self.unused = Convolution(o3.Irreps(HIDDEN), "3x0e")


def test_modules_that_are_called_twice_or_never(double: None) -> None:
    model = attach(Chained(), budget=20, gamma_init=1.0, **SILENT)
    assert [site.name for site in model.ace.sites] == [
        "convolutions.0.gate",
        "convolutions.1.gate",
        "readout",
        "unused.gate",
    ]
    batch = molecules()
    assert equivariance_error(model, batch, branches_on=False).relative < 1e-12
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(*batch).square().mean().backward()
        optimizer.step()
    assert all(torch.isfinite(torch.tensor([site.gamma, site.lambda_])).all() for site in status(model).sites)
    assert status(model).landed


def test_the_map_that_ends_a_convolution_is_its_site() -> None:
    wide, gates = o3.Irreps("4x0e+4x1o"), o3.Irreps("2x0e+2x1o")
    for middle in (wide, o3.Irreps("5x0e+5x1o")):
        product = ("product", o3.FullyConnectedTensorProduct(wide, "1o", middle, shared_weights=False))
        inside, end = [("enter", o3.Linear(wide, wide)), product], ("end", o3.Linear(middle, gates))
        assert names(*inside, ("scale", o3.Linear(middle, "0e")), end) == ["end"]
        own = ("own", o3.FullyConnectedTensorProduct(wide, "2x0e", gates))
        assert names(own, *inside, end) == ["own"], "a self-connection reads what the layer reads"
    assert names(own, *inside, end, irreps_in=wide) == ["end"], "but not where that is the model's input"
    again = [("product_2", copy.deepcopy(product[1])), ("end_2", o3.Linear(middle, gates))]
    assert names(*inside, end, *again) == ["end", "end_2"]
    assert names(*inside, end, ("norm", NormActivation(gates, torch.sigmoid))) == ["norm"], "what follows is the end"


def test_a_product_that_nothing_follows_is_a_site_itself() -> None:
    product = o3.FullyConnectedTensorProduct("4x0e+4x1o", "1o", "2x0e+2x1o", shared_weights=False)
    assert names(("product", product)) == ["product"]
    bare = o3.FullTensorProduct("4x0e+4x1o", "1o")
    with pytest.raises(AdapterError, match="site"):
        attach(nn.Sequential(bare), adapter="e3nn")
    assert names(("product", bare), ("after", o3.Linear(bare.irreps_out, "1x1o"))) == ["after"]


def test_what_is_no_site() -> None:
    wide, out = "4x0e+4x1o", "2x0e+2x1o"
    embedding, readout = ("embedding", o3.Linear("1x0e+1x1o", wide)), ("readout", o3.Linear(wide, out))
    assert names(embedding, readout) == ["embedding", "readout"]
    assert names(embedding, readout, irreps_in="1x0e+1x1o") == ["readout"], "the model's own input is not read"
    assert names(embedding, irreps_in="1x0e+1x1o") == ["embedding"], "unless there is nothing else"
    assert names(("scalars", o3.Linear("4x0e", "4x0e")), readout) == ["readout"]
    assert names(("pseudo", o3.Linear("4x0o", "4x0o")), readout) == ["pseudo", "readout"], "mirrors change them"
    assert names(("channels", o3.Linear(wide, wide, f_in=2, f_out=3)), readout) == ["readout"]
    assert names(readout, ("again", readout[1])) == ["readout"], "one module under two names"

    class Reversed(o3.Linear):  # type: ignore[misc]
        def forward(self, weight: Any, features: Any) -> Any:
            return super().forward(features, weight)

    assert names(("reversed", Reversed(wide, wide)), readout) == ["readout"], "a forward that nobody knows"


def test_the_wider_operand_of_a_product_has_the_features() -> None:
    model = nn.Sequential(o3.FullyConnectedTensorProduct("1o", "4x0e+4x1o", "2x1o"))
    (site,) = sites(model)
    assert (site.reads.argument, site.shape_in, site.shape_out) == (1, (16,), (6,))  # type: ignore[union-attr]


class Untold(nn.Module):
    """A model without irreps attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.map = o3.Linear("2x0e+2x1o", "2x0e+2x1o")

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.map(h)
        return out


def test_a_model_that_without_irreps_gets_advice() -> None:
    told = r"Untold: .*irreps_out.*model.ace_action = GroupAction"
    with pytest.warns(AceWarning, match=f"random frames.*{told}"):
        model = attach(Untold(), mode="strict", **SILENT)
    h = torch.randn(5, 8)
    model(h).sum().backward()
    assert float(model.ace.gamma.grad) != 0
    with pytest.raises(AdapterError, match=told):
        equivariance_error(model, h)
    with pytest.raises(AdapterError, match=told):
        attach(Untold(), frames="on")
    model.irreps_out = "2x0e+2x1o"
    with pytest.raises(AdapterError, match="'h': .*irreps_h.*ace_action"):
        equivariance_error(model, h)
    model.irreps_h = o3.Irreps("2x0e+2x1o")
    assert equivariance_error(model, h).relative < 1e-5


def test_a_model_may_carry_its_action() -> None:
    model = Untold()
    model.ace_action = GroupAction(E3, {"h": Irreps("2x0e+2x1o")}, outputs=Irreps("2x0e+2x1o"))
    attach(model, adapter="e3nn", frames="on", **SILENT)
    assert model.ace.action is model.ace_action
    assert equivariance_error(copy.deepcopy(model), torch.randn(5, 8)).relative < 1e-5
    model.ace_action = "2x0e"
    with pytest.raises(AdapterError, match=r"Untold.ace_action: .*found str"):
        equivariance_error(model, torch.randn(5, 8))


def test_forwards_without_names_get_advice() -> None:
    model = nn.Sequential(o3.Linear("1o", "1o"))
    model.irreps_out = "1o"
    model.forward = lambda *args: args[0]  # type: ignore[method-assign,assignment]
    with pytest.raises(AdapterError, match=r"Sequential.forward\(\*args\): .*ace_action"):
        equivariance_error(model, torch.randn(2, 3))


def test_inputs_by_name() -> None:
    turn = E3.sample(torch.Generator().manual_seed(0))
    told = (("irreps_in", "1x1e"), ("irreps_edge_attr", "1x0o"))
    three, one = torch.randn(4, 3), torch.randn(4, 1)
    expected = {
        "pos": (three, Positions()),
        "edge_vec": (three, Vectors()),
        "x": (three, Irreps("1x1e")),
        "edge_attr": (one, Irreps("0o")),
        "edge_length": (one, Invariant()),
        "y": (one, Invariant()),
        "anything": (torch.arange(4), Invariant()),
    }
    by_name = ByName("data", told)(turn, {name: value for name, (value, _) in expected.items()})
    for name, (value, action) in expected.items():
        assert torch.equal(by_name[name], action(turn, value)), name
        assert torch.equal(ByName(name, told)(turn, value), action(turn, value)), name
    assert ByName("cutoff", told)(turn, 4.0) == 4.0
    assert ByName("x", told)(turn, None) is None
    for value, match in (({"spin": three}, "'spin': "), ([three], "a dict or a graph, found list")):
        with pytest.raises(AdapterError, match=match):
            ByName("data", told)(turn, value)


def test_models_without_e3nn_modules() -> None:
    with pytest.raises(AdapterError, match=r"e3nn \(models of e3nn modules\)"):
        attach(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(AdapterError, match="Sequential: .*found none"):
        attach(nn.Sequential(nn.Linear(2, 2)), adapter="e3nn")
    with pytest.raises(AdapterError, match="Linear: .*found an e3nn module itself"):
        attach(o3.Linear("1o", "1o"), adapter="e3nn")


@pytest.fixture
def by_class() -> Iterator[None]:
    class Claims:
        @hookimpl
        def ace_upstream(self) -> Upstream:
            return Upstream("Net", (f"{Net.__module__}:Net",))

        @hookimpl
        def ace_layers(self, model: Net) -> list[Site]:
            return [Site("readout", "readout", (20,), (4,))]

    registry().add(Claims(), "claims")
    yield
    registry().remove("claims")


def test_an_adapter_that_claims_the_class_comes_first(by_class: None) -> None:
    assert attach(Net(), **SILENT).ace.adapter == "claims"
    assert attach(Net(), adapter="e3nn", **SILENT).ace.adapter == "e3nn"
