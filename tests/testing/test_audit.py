"""audit: the layer that was broken on purpose is found, what is right is called so, and the model stays as it was."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Layered, VectorMaps

from ace_plugins import attach, audit, averaged, equivariance_error, project, use_branches
from ace_plugins.adapter import E3, O3, SO3, Call, Cyclic, Grid, GroupAction, Invariant, Positions, Vectors
from ace_plugins.errors import AceError, AdapterError, AttachError, ConfigError

VECTORS = GroupAction(O3, {"x": Vectors(axis=-2)}, outputs=Vectors(axis=-2))
"""Vector channels [n, 3, c] to the same."""
POINTS = GroupAction(E3, {"pos": Positions()}, outputs=Invariant())
"""Points [n, 3] to invariants."""


class Mix(nn.Module):
    """Mixes the channels of vectors [n, 3, c]."""

    def __init__(self, channels: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.map = nn.Linear(channels, channels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.map(x)
        return mixed


class Gate(nn.Module):
    """Scales every vector by a function of its length."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(x.norm(dim=-2, keepdim=True))


class Bend(nn.Module):
    """Not for vectors: works on x, y and z each by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Upwards(nn.Module):
    """Scales vectors by how far they point along a fixed axis."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x[:, 2:].square())


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().double()


class Numbered(nn.Module):
    """Adds something to z that depends on the row."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tensor([0.0, 0.0, 1.0]).to(x)
        return x + torch.arange(len(x)).to(x)[:, None, None] * z[:, None]


class Distances(nn.Module):
    """[n, 3] -> [n, n], which no rigid motion changes."""

    def forward(self, pos: Tensor) -> Tensor:
        return (pos[:, None] - pos[None]).square().sum(-1)


class Radii(nn.Module):
    """[n, 3] -> [n, n] of distances from the origin: rotations do not change them, translations do."""

    def forward(self, pos: Tensor) -> Tensor:
        return pos.square().sum(-1, keepdim=True).expand(-1, len(pos)).contiguous()


class Energy(nn.Module):
    def __init__(self, points: int, lengths: nn.Module) -> None:
        super().__init__()
        self.lengths = lengths
        self.head = nn.Sequential(nn.Linear(points, 5), nn.SiLU(), nn.Linear(5, 1))

    def forward(self, pos: Tensor) -> Tensor:
        out: Tensor = self.head(self.lengths(pos))
        return out


class Steps(nn.Module):
    """Layers one after the other, with a residual where asked, and with what ``own`` does in the model's own code."""

    def __init__(self, *layers: nn.Module, residual: bool = False, own: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.residual = residual
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x if self.residual else layer(x)
        return x + self.own


class Invariants(nn.Module):
    """Lengths of vectors, then plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.norm(dim=-2))
        return out


def vectors() -> Tensor:
    return torch.randn(6, 3, 4, dtype=torch.float64)


def points() -> Tensor:
    return torch.randn(6, 3, dtype=torch.float64)


def names(found: Any) -> list[str]:
    return [layer.name for layer in found.culprits]


@pytest.mark.parametrize(
    ("layers", "culprit"),
    [
        (lambda: (Mix(), Gate(), Mix(bias=True), Gate()), "layers.2.map"),
        (lambda: (Mix(), Upwards(), Mix()), "layers.1"),
        (lambda: (Bend(), Mix(), Gate()), "layers.0"),
        (lambda: (Mix(), Mix(), Gate(), Numbered(), Mix()), "layers.3"),
        (lambda: (Gate(), Mix(), Rounded(), Mix()), "layers.2"),
    ],
    ids=["a bias on vectors", "an axis", "a nonlinearity on components", "an index", "a cast"],
)
@pytest.mark.parametrize("residual", [False, True])
def test_the_layer_that_was_broken_is_found(
    layers: Callable[[], tuple[nn.Module, ...]], culprit: str, residual: bool
) -> None:
    made = layers()  # now, so that they are seeded
    found = audit(Steps(*made, residual=residual), vectors(), VECTORS)
    assert names(found) == [culprit]
    rounded = any(isinstance(layer, Rounded) for layer in made)
    assert found.verdict == ("symmetric to single precision" if rounded else "broken")
    assert found.relative > (1e-9 if rounded else 1e-3)


def test_positions_from_a_fixed_origin_are_found() -> None:
    found = audit(Energy(6, Radii()), points(), POINTS)
    assert (found.verdict, names(found)) == ("broken", ["lengths"])
    assert next(layer.behaviour for layer in found.layers if layer.name == "lengths") == "changes"


@pytest.mark.parametrize(
    ("make", "draw", "action"),
    [
        (lambda: Steps(Mix(), Gate(), Mix(), residual=True), vectors, VECTORS),
        (lambda: Energy(6, Distances()), points, POINTS),
        (Invariants, vectors, GroupAction(O3, {"x": Vectors(axis=-2)}, outputs=Invariant())),
        (VectorMaps, vectors, GroupAction(SO3, {"x": Vectors(axis=-2)}, outputs=Vectors(axis=-2))),
        (
            lambda: nn.Sequential(nn.AvgPool2d(2), nn.ReLU()),
            lambda: torch.rand(3, 2, 8, 8),
            GroupAction(Cyclic(4), {"input": Grid()}, Grid()),
        ),
    ],
    ids=["vectors", "distances", "lengths", "vector neurons", "images"],
)
def test_what_is_right_is_called_so(
    make: Callable[[], nn.Module], draw: Callable[[], Tensor], action: GroupAction
) -> None:
    model = make()
    found = audit(model, draw(), action)
    assert (found.verdict, found.culprits, found.precision, found.as_given) == ("symmetric", (), "float64", "")
    assert found.relative < 1e-12
    assert {layer.behaviour for layer in found.layers} <= {"invariant", "turns", "shifts"}
    called = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    assert len(found.layers) == len(called)


def test_an_error_in_the_models_own_code_is_the_models() -> None:
    found = audit(Steps(Mix(), Gate(), own=0.5), vectors(), VECTORS)
    assert names(found) == [""]
    inner = audit(nn.Sequential(Mix(), Steps(Mix(), own=0.5), Gate()), vectors(), _of("input", VECTORS))
    assert names(inner) == ["1"], "not the model around it, and not the layers in it"


def _of(name: str, action: GroupAction) -> GroupAction:
    return GroupAction(action.group, {name: next(iter(action.inputs.values()))}, action.outputs)


def test_axes_in_another_order_pass_in_a_layer_and_are_blamed_on_the_model() -> None:
    class Reordered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, [1, 2, 0]]

    found = audit(Steps(Mix(), Reordered()), vectors(), VECTORS)
    assert (found.verdict, names(found)) == ("broken", [""])


def test_what_keeps_every_length_and_no_angle_is_found() -> None:
    class Alternating(nn.Module):
        """Every other row has its axes in another order."""

        def forward(self, x: Tensor) -> Tensor:
            odd = (torch.arange(len(x)) % 2 == 1)[:, None, None]
            return torch.where(odd, x[:, [1, 2, 0]], x)

    assert names(audit(Steps(Mix(), Alternating(), Gate()), vectors(), VECTORS)) == ["layers.1"]


def test_declared_actions_find_what_no_gram_matrix_shows() -> None:
    class Reordered(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, [1, 2, 0]]

    model = VectorMaps()
    model.map_to_dir = Reordered(4, 4, bias=False)
    found = audit(model, vectors())
    assert (found.verdict, names(found)) == ("broken", ["map_to_dir"])
    unknown = audit(model, vectors(), GroupAction(SO3, {"x": Vectors(axis=-2)}, outputs=Vectors(axis=-2)))
    assert (unknown.verdict, names(unknown)) == ("broken", [""]), "without them the model is blamed"


def test_a_layer_without_an_orthonormal_basis_is_not_blamed_in_a_model_that_is_right() -> None:
    class Skewed(nn.Module):
        def __init__(self, *, back: bool) -> None:
            super().__init__()
            skew = torch.tensor([[2.0, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
            self.register_buffer("matrix", torch.linalg.inv(skew) if back else skew)

        def forward(self, x: Tensor) -> Tensor:
            turned: Tensor = self.matrix @ x
            return turned

    found = audit(Steps(Skewed(back=False), Mix(), Skewed(back=True)), vectors(), VECTORS)
    assert found.layers[1].behaviour == "changes"
    assert (found.verdict, found.culprits) == ("symmetric", ())


def test_rounding_that_is_left_of_what_cancels_is_not_blamed() -> None:
    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0, keepdim=True)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle = Middle()
            self.mix = Mix(bias=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(0)
            mixed: Tensor = self.mix(x + self.middle(x))  # which is 0, but for rounding
            return mixed

    found = audit(Centred(), vectors(), VECTORS)
    middle = next(layer for layer in found.layers if layer.name == "middle")
    assert middle.behaviour in ("invariant", "turns")
    assert names(found) == ["mix.map"]


def test_values_that_are_not_finite_are_reported_and_not_judged() -> None:
    class Poles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0

    found = audit(Steps(Mix(), Poles()), vectors(), VECTORS)
    assert found.verdict == "broken"
    assert found.layers[-1].behaviour == "unknown"
    told = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(told)["error"]["relative"] is None


def test_a_model_that_cannot_be_copied_is_audited_itself() -> None:
    model: Any = attach(VectorMaps().double(), trace=False)
    model.lock = threading.Lock()  # which no copy can have
    batch = vectors()
    with pytest.raises(TypeError):
        copy.deepcopy(model)
    found = audit(model, batch, branches_on=True)
    assert found.as_given.startswith("not converted to float64: TypeError")
    assert (found.precision, found.verdict) == ("float64", "broken")
    assert names(found) == ["map_to_feat", "map_to_dir"]
    assert audit(model, batch, branches_on=False).verdict == "symmetric"
    assert model.training


def test_several_layers_are_blamed_where_the_later_error_is_much_larger() -> None:
    slight = Mix(bias=True)
    with torch.no_grad():
        slight.map.bias.fill_(2e-4)
    assert names(audit(Steps(slight, Gate(), Numbered()), vectors(), VECTORS)) == ["layers.0.map", "layers.2"]
    with torch.no_grad():
        slight.map.bias.fill_(1.0)
    assert names(audit(Steps(slight, Gate(), Numbered()), vectors(), VECTORS)) == ["layers.0.map"]


def test_the_calls_of_a_layer_that_is_used_twice_are_listed_separately() -> None:
    mix = Mix()
    found = audit(Steps(mix, Bend(), mix), vectors(), VECTORS)
    assert [layer.name for layer in found.layers] == [
        "", "layers.0", "layers.0.map", "layers.1", "layers.0#2", "layers.0.map#2",
    ]  # fmt: skip
    assert names(found) == ["layers.1"]


def test_inputs_that_no_action_covers_are_named() -> None:
    class Graph(nn.Module):
        def forward(self, graph: dict[str, Tensor], h: Tensor, *, v: Tensor | None = None) -> Tensor:
            return graph["pos"] * h + (0 if v is None else v)

    action = GroupAction(SO3, {"graph.pos": Vectors()}, outputs=Vectors())
    graph = {"pos": torch.randn(4, 3), "field": torch.randn(4, 3), "index": torch.arange(4)}
    found = audit(Graph(), Call((graph, torch.randn(4, 1)), {"v": torch.randn(4, 3)}), action)
    assert found.uncovered == ("graph.field", "h", "v")
    assert names(found) == [""]


def test_a_model_that_computes_in_float32_alone_is_audited_as_it_is() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix()

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            mixed: Tensor = self.mix(x)
            return mixed

    found = audit(Stubborn(), vectors().float(), VECTORS)
    assert (found.precision, found.verdict) == ("float32", "symmetric")
    assert found.as_given == "not converted to float64: TypeError: float32 only"
    assert 1e-9 < found.relative < 1e-5


def test_functions_are_audited_with_their_preprocessing() -> None:
    model = Steps(Mix(), Gate()).double()
    outputs = []

    def centred(x: Tensor) -> Tensor:
        outputs.append(x.dtype)
        return model(x - x.mean(0))  # type: ignore[no-any-return]

    found = audit(centred, vectors().float(), VECTORS)
    assert (found.verdict, found.layers, set(outputs)) == ("symmetric", (), {torch.float64})
    assert audit(lambda x: model(x - x.mean(1, keepdim=True)), vectors(), VECTORS).relative > 1e-2
    single = Steps(Mix(), Gate())
    assert audit(lambda x: single(x), vectors().float(), VECTORS).precision == "float32"


def test_attached_models_are_audited_with_and_without_branches() -> None:
    model: Any = attach(VectorMaps(), trace=False).double()
    batch = vectors()
    plain = audit(model, batch, branches_on=False)
    assert plain.verdict == "symmetric"
    assert plain.relative == equivariance_error(model, batch, 8, branches_on=False).relative
    relaxed = audit(model, batch, branches_on=True)
    assert relaxed.relative == equivariance_error(model, batch, 8, branches_on=True).relative
    assert names(relaxed) == ["map_to_feat", "map_to_dir"]
    assert all(layer.known for layer in relaxed.layers)
    with use_branches(model, True):
        assert audit(model, batch).to_dict() == relaxed.to_dict()
    json.dumps(relaxed.to_dict())
    mean = averaged(model, 64)
    with use_branches(model, True):
        smooth = audit(mean, batch, mean.action, layers=False)
    assert smooth.layers == ()
    assert smooth.relative < relaxed.relative / 2
    with torch.no_grad():
        model.ace.gamma[0] = 0
    assert names(audit(model, batch, branches_on=True)) == ["map_to_dir"]
    assert audit(project(model), batch).verdict == "symmetric"


def test_an_audit_changes_nothing() -> None:
    model: Any = attach(Layered(), trace=False).train()
    model.head.eval()
    batch = torch.randn(8, 3, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    watched = copy.deepcopy(vars(model.ace.budget))
    state = torch.get_rng_state()
    first = audit(model, batch, branches_on=True)
    assert first.to_dict() == audit(model, batch, branches_on=True).to_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert flags == [module.training for module in model.modules()]
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert watched == vars(model.ace.budget)
    assert batch.grad is None
    assert (batch.dtype, model.head.weight.dtype) == (torch.float32, torch.float32)
    assert model.ace.passes.forced is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, torch.ones(1)), ConfigError, "expected a model, or a function .*found int"),
        ((lambda x: x, torch.ones(1)), ConfigError, "a function and action=GroupAction.*, found function"),
        ((nn.Identity(), torch.ones(1)), AdapterError, "no adapter supports the class"),
        ((nn.Identity(), torch.ones(1), O3), ConfigError, "action: expected a GroupAction, found Euclidean"),
        ((Steps(Mix()), (torch.ones(1), 2), VECTORS), ConfigError, "batch does not fit Steps.forward"),
    ],
)
def test_mistakes_are_named(arguments: tuple[Any, ...], error: type[AceError], message: str) -> None:
    with pytest.raises(error, match=message):
        audit(*arguments)


def test_branches_need_an_attached_model() -> None:
    with pytest.raises(AttachError, match="Layered has no ACE attached"):
        audit(Layered(), torch.randn(4, 3), branches_on=True)
