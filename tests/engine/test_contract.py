"""What the contract carries: shapes of layers and models that upstreams of today have, one small model for each."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Layered

import ace_plugins
from ace_plugins import AceError, attach, export, project, status, use_branches
from ace_plugins import adapter as ace
from ace_plugins.contract.upstreams import class_path
from ace_plugins.engine.forward import RestoreHook
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import check_adapter
from ace_plugins.testing.doctor import diagnose


class SmallAdapter:
    """An adapter made of two functions."""

    def __init__(
        self,
        model: type[nn.Module],
        layers: Callable[[Any], Sequence[ace.Node]],
        branch: Callable[[ace.Node], nn.Module] | None = None,
        action: ace.GroupAction | None = None,
        example: Callable[[], ace.Example] | None = None,
        evaluating: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.layers, self.branch, self.action, self.example = model, layers, branch, action, example
        self.evaluating = evaluating or {}

    @ace.hookimpl
    def ace_upstream(self) -> ace.Upstream:
        return ace.Upstream(self.model.__name__, (class_path(self.model),), evaluating=self.evaluating)

    @ace.hookimpl
    def ace_preset(self) -> dict[str, dict[str, Any]]:
        """The paper's loop, in which every training forward has its branches."""
        return {"fit": {"loop": "paper"}}

    @ace.hookimpl
    def ace_layers(self, model: Any) -> Sequence[ace.Node]:
        return self.layers(model)

    @ace.hookimpl
    def ace_branch(self, site: ace.Node) -> nn.Module | None:
        return None if self.branch is None else self.branch(site)

    @ace.hookimpl
    def ace_group_action(self) -> ace.GroupAction | None:
        return self.action

    @ace.hookimpl
    def ace_example(self, seed: int) -> ace.Example:
        assert self.example is not None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.example()


@contextmanager
def adapter(*args: Any, **kwargs: Any) -> Iterator[None]:
    registry().add(SmallAdapter(*args, **kwargs), "small")
    try:
        yield
    finally:
        registry().remove("small")


class Rewriting(nn.Module):
    """A layer that writes its output into the dict it was given, as NequIP's do, or into the list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        data["x"] = 100 + self.linear(data["x"])
        return data


class DictModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rewriting() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        data = {"x": x}
        for layer in self.layers:
            data = layer(data)
        return data["x"]


def dict_sites(model: Any) -> list[ace.Node]:
    return [
        ace.Site(f"layers.{i}", f"layers.{i}", (4,), (4,), reads=ace.Tap("data.x"), output="x")
        for i in range(len(model.layers))
    ]


def test_a_site_reads_its_input_before_its_module_runs() -> None:
    with adapter(DictModel, dict_sites, ace.linear):
        model = attach(DictModel())
        x = torch.randn(5, 4)
        branches = [model.ace.branch(f"layers.{i}") for i in range(2)]
        first = 100 + model.layers[0].linear(x) + branches[0](x)
        expected = 100 + model.layers[1].linear(first) + branches[1](first)
        assert torch.allclose(model(x), expected)
        with use_branches(model, True):
            alone = model.layers[0]({"x": x})["x"]
        assert torch.allclose(alone, first), "a layer called on its own reads the same"


class Keywords(nn.Module):
    """A layer that is called with keywords only, as MACE's products are."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.product(input2=x, input1=2 * x)
        return out


class Flagged(nn.Module):
    """A forward that is told whether it trains, as MACE's is; nobody calls ``model.eval()``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layered()

    def forward(self, x: Tensor, training: bool = False, force: bool = True) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_a_forward_with_an_argument_for_training() -> None:
    x = torch.randn(5, 3)
    told = {"training": False, "force": True}
    action = ace.GroupAction(ace.O3, {"x": ace.Vectors()}, ace.Invariant())
    sites = [ace.Site("layers.0", "inner.layers.0", (8,), (8,))]
    with adapter(Flagged, lambda model: sites, action=action, evaluating=told):
        plain = Flagged()
        expected = plain(x)
        model = attach(copy.deepcopy(plain), mode="strict", budget="99 epochs", loop="paced", frames="off", trace=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            for _ in range(7):
                optimizer.zero_grad()
                model(x, training=True).sum().backward()
                optimizer.step()
            assert torch.equal(model(x), expected), "told to evaluate, by default"
            assert torch.equal(model(x, False), expected)
        assert model.ace.budget.epoch_steps == 7, "evaluations tell epochs apart"
        assert model.training, "its own flag stays"
        assert not torch.equal(model(x, True), expected)
        ace_plugins.equivariance_error(model, (x,), branches_on=True, samples=1)
        assert not model.ace.passes.evaluates, "the host's own evaluations do not count"
        assert not torch.equal(model(x, force=False), expected), "one of two is not enough"
        assert torch.equal(copy.deepcopy(model).eval()(x, True), expected), "model.eval() goes over it"
        resilient = attach(copy.deepcopy(plain), mode="resilient", spectral_norm=True, trace=False)
        assert not torch.equal(resilient(x), expected), "where the branches are deployed they stay"


def test_inputs_that_come_by_keyword() -> None:
    with adapter(Keywords, lambda m: [ace.Site("product", "product", (4,), (4,), reads=ace.Tap("input1"))], ace.linear):
        model = attach(Keywords())
        x = torch.randn(3, 4)
        plain = nn.functional.bilinear(2 * x, x, model.product.weight, model.product.bias)
        assert torch.allclose(model(x), plain + model.ace.branch("product")(2 * x))


class Forces(nn.Module):
    """Energies, and forces that the forward differentiates out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, pos: Tensor) -> dict[str, Tensor]:
        pos = pos if pos.requires_grad else pos.detach().requires_grad_()
        centred = pos - pos.mean(0)
        h = torch.tanh(self.layer(torch.tanh(self.lift(centred.square().sum(-1, keepdim=True)))))
        energy = self.head(h).sum()
        (gradient,) = torch.autograd.grad(energy, pos, create_graph=True)
        return {"energy": energy, "forces": -gradient}


def force_adapter() -> Any:
    nodes = [
        ace.Stem("lift", ace.Tap("pos", ""), (3,), (8,)),
        ace.Site("layer", "layer", (8,), (8,), reads="lift"),
    ]
    action = ace.GroupAction(
        ace.SO3, {"pos": ace.Vectors()}, outputs={"energy": ace.Invariant(), "forces": ace.Vectors()}
    )
    return adapter(Forces, lambda m: nodes, None, action, lambda: ace.Example(Forces(), (torch.randn(6, 3),)))


def test_models_that_differentiate_inside_their_forward_are_measured() -> None:
    with force_adapter():
        check_adapter("small")
        found = diagnose("small")
        assert found.problems == ()
        assert found.error_at_0.relative < 1e-5 < found.error_at_1.relative
        model = attach(Forces(), mode="resilient", spectral_norm=True, error_every=1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        out = model(torch.randn(6, 3))
        (out["energy"].square() + out["forces"].square().sum()).backward()  # through the forces: a second derivative
        optimizer.step()
    (folder,) = Path(os.environ["ACE_RUNS"]).iterdir()
    assert ace_plugins.read_trace(folder)[0]["error"]["relative"] > 0


class Stack(nn.Sequential):
    """A model that is a Sequential: every submodule is a step of its forward, as SevenNet's are."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_sequential_does_not_run_ace_as_a_step() -> None:
    with adapter(Stack, lambda m: [ace.Site("0", "0", (4,), (4,))], ace.linear):
        torch.manual_seed(0)
        model = Stack()
        plain = copy.deepcopy(model)
        x = torch.randn(3, 4)
        attach(model)
        assert torch.equal(model.eval()(x), plain(x))
        relaxed = plain[2](torch.tanh(plain[0](x) + model.ace.branch("0")(x)))
        assert torch.allclose(model.train()(x), relaxed)
        torch.nn.init.zeros_(model.ace.gamma)
        plain.load_state_dict(export(model.state_dict()))
        assert len(project(model)) == 3


class Tuples(nn.Module):
    """A layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.parametrize(
    ("model", "output", "refusal"),
    [
        (Tuples, None, r"site 'layers.0': layers.0 returns a tuple, .*set output= to one of 0, 1"),
        (DictModel, None, r"site 'layers.0': layers.0 returns a dict, .*set output= to one of 'x'"),
        (Tuples, 7, r"output of layers.0: unknown part of tuple '7'"),
    ],
)
def test_an_output_that_the_site_does_not_name_is_refused(model: Any, output: Any, refusal: str) -> None:
    reads = ace.Tap("data.x") if model is DictModel else ace.Tap()
    with adapter(model, lambda m: [ace.Site("layers.0", "layers.0", (4,), (4,), reads=reads, output=output)]):
        attached = attach(model())
        with pytest.raises(AceError, match=refusal):
            attached(torch.randn(2, 4))
        site = [ace.Site("layers.0", "layers.0", (4,), (4,), reads=reads, output=0 if model is Tuples else "x")]
    with adapter(model, lambda m: site):
        assert attach(model())(torch.randn(2, 4)).shape == (2, 4), "and as it says, it works"


class Twice(nn.Module):
    """One layer, run twice in a forward on other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x))
        return out


def test_a_plain_branch_reads_anew_in_every_call() -> None:
    """Also where the branch reads its own module's input, which differs from call to call."""
    with adapter(Twice, lambda m: [ace.Site("layer", shape_in=(4,), shape_out=(4,))], ace.linear):
        torch.manual_seed(0)
        model = attach(Twice().double())
        with torch.no_grad():
            model.ace.gamma.fill_(0.5)
        branch = model.ace.branch("layer")

        def layer(x: Tensor) -> Tensor:
            return torch.tanh(x @ model.layer[0].weight.T) + 0.5 * branch(x)

        x = torch.randn(3, 4, dtype=torch.float64)
        torch.testing.assert_close(model(x), layer(layer(x)), rtol=1e-12, atol=1e-12)


class Pixels(nn.Module):
    """Images [B, 2, H, W] -> [B, 3, H, W], one pixel at a time."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 3, 1, stride=stride)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.mix(image)
        return out


@pytest.mark.parametrize("axis", [1, -3])
def test_a_linear_branch_on_channels_that_come_first(axis: int) -> None:
    """On the axis of the channels, the branch is the 1x1 convolution with its weights."""
    site = ace.Site("mix", shape_in=(2,), shape_out=(3,), axis=axis)
    assert site.module == "mix", "the submodule that a site names, where it names no other"
    with adapter(Pixels, lambda m: [site], ace.linear):
        torch.manual_seed(0)
        model = attach(Pixels().double())
        x = torch.randn(4, 2, 5, 6, dtype=torch.float64, requires_grad=True)
        gamma = torch.tensor([0.3], dtype=torch.float64)
        with torch.no_grad():
            model.ace.gamma.copy_(gamma)
        (inner,) = (part for part in model.ace.branches.modules() if isinstance(part, nn.Linear))
        weight, bias = model.mix.weight[:, :, 0, 0] + 0.3 * inner.weight, model.mix.bias + 0.3 * inner.bias
        expected = torch.einsum("oc,bchw->bohw", weight, x) + bias[:, None, None]
        found = model(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        one, two = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (found, expected))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        (slope,) = torch.autograd.grad(found.sum(), model.ace.gamma)
        added = torch.einsum("oc,bchw->bohw", inner.weight, x) + inner.bias[:, None, None]
        torch.testing.assert_close(slope[0], added.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "stride", "refusal"),
    [
        ({}, 1, r"'mix' reads features of shape \(6,\) in the last dimensions of \[4, 2, 5, 6\], .*set axis"),
        ({"axis": 2}, 1, r"'mix' reads features of shape \(5,\) in dimension 2 of \[4, 2, 5, 6\], expected .*\(2,\)"),
        ({"axis": 4}, 1, r"'mix' reads features of shape \(\) in dimension 4"),
        ({"axis": 1}, 2, r"its branch returns shape \(4, 3, 5, 6\), expected \(4, 3, 3, 3\)"),
    ],
)
def test_features_on_another_axis_are_refused(options: dict[str, int], stride: int, refusal: str) -> None:
    sites = [ace.Site("mix", shape_in=(2,), shape_out=(3,), **options)]
    with adapter(Pixels, lambda m: sites, ace.linear), pytest.raises(AceError, match=refusal):
        attach(Pixels(stride))(torch.randn(4, 2, 5, 6))


@pytest.mark.parametrize("branch", [ace.linear, ace.mlp, ace.norm_linear])
def test_every_branch_of_the_host_takes_an_axis(branch: Any) -> None:
    torch.manual_seed(0)
    site = ace.Site("mix", shape_in=(2,), shape_out=(3,), axis=1)
    made = branch(site).double().eval()
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(made(x), made.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


class Adding(nn.Linear):
    """A branch that adds itself."""

    prepared = 0

    def prepare(self, read: Tensor) -> Tensor:
        type(self).prepared += 1
        return read.clone()

    def add_to(self, output: Tensor, gamma: Tensor, prepared: Tensor) -> Tensor:
        return output + gamma * self(prepared)

    restored = 0

    def restore(self, output: Tensor) -> Tensor:
        type(self).restored += 1
        return output


def test_a_branch_that_adds_itself_reads_anew_in_every_call() -> None:
    assert isinstance(Adding(4, 4), ace.AddsItself)
    assert not isinstance(nn.Linear(4, 4), ace.AddsItself)
    nodes = [ace.Site(name, name, (4,), (4,), reads=ace.Tap(0, "layer")) for name in ("layer.0", "layer.1")]
    with adapter(Twice, lambda m: nodes, lambda site: Adding(4, 4)):
        torch.manual_seed(0)
        model = attach(Twice())
        one, two = (model.ace.branch(name) for name in ("layer.0", "layer.1"))
        x = torch.randn(3, 4)

        def layer(x: Tensor) -> Tensor:
            return torch.tanh(x @ model.layer[0].weight.T + one(x)) + two(x)

        Adding.prepared = 0
        assert torch.allclose(model(x), layer(layer(x)))
        assert Adding.prepared == 2, "once for both sites, and once for each call"
        hooks = list(model.layer._forward_hooks.values())
        assert sum(isinstance(hook, RestoreHook) for hook in hooks) == 1


def test_only_outputs_that_branches_were_added_to_are_restored() -> None:
    nodes = [ace.Site(name, name, (4,), (4,), reads=ace.Tap(0, "layer")) for name in ("layer.0", "layer.1")]
    with adapter(Twice, lambda m: nodes, lambda site: Adding(4, 4)):
        torch.manual_seed(0)
        model = attach(Twice())
        x = torch.randn(3, 4)
        (hook,) = [each for each in model.layer._forward_hooks.values() if isinstance(each, RestoreHook)]
        assert hook(model.layer, (x,), x) is None, "outside the model's forward pass"
        Adding.restored = 0
        skipped = model.layer.register_forward_pre_hook(lambda module, args: hook(module, args, x))
        model(x)
        assert Adding.restored == 3, "not before the first call, when no branch had been added"
        skipped.remove()


# Optimizers that were built without gamma.


def adopted(optimizer: torch.optim.Optimizer, model: Any) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if any(p is model.ace.gamma for p in group["params"])]


def layered(**settings: Any) -> Any:
    torch.manual_seed(0)
    return attach(Layered(), **settings)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    x = torch.linspace(-1, 1, 36).reshape(12, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def test_gamma_is_adopted_by_an_optimizer_of_named_submodules() -> None:
    model = layered()
    groups = [
        {"name": "head", "params": list(model.head.parameters()), "lr": 0.5},
        {"name": "layers", "params": list(model.layers.parameters()), "lr": 0.01, "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, amsgrad=True)
    (group,) = adopted(optimizer, model)
    assert len(optimizer.param_groups) == 2
    assert (group["lr"], group["name"]) == (0.01, "layers"), "the group of most weights"
    assert set(map(id, model.ace.parameters())) < set(map(id, group["params"]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = copy.deepcopy(model.ace.state_dict())
    train(model, optimizer)
    scheduler.step()
    assert group["lr"] == 0.005
    assert status(model).steps == 3
    assert not torch.equal(before["gamma"], model.ace.gamma)
    twin = torch.optim.AdamW(copy.deepcopy(groups[:1]), lr=1.0)
    assert len(twin.param_groups[0]["params"]) == 2, "another model's weights"


def test_adoption_is_the_same_as_handing_gamma_over() -> None:
    one, two = layered(), layered()
    ours = {id(p) for p in one.ace.parameters()}
    train(one, torch.optim.SGD([p for p in one.parameters() if id(p) not in ours], lr=0.1, momentum=0.9))
    train(two, torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_gamma_is_given_back_to_whoever_names_it() -> None:
    model = layered()
    first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    assert adopted(first, model)
    second = torch.optim.SGD(model.ace.parameters(), lr=0.1)
    assert adopted(second, model)
    assert not adopted(first, model)
    assert [len(group["params"]) for group in first.param_groups] == [6]
    third = torch.optim.SGD(model.head.parameters(), lr=0.1)
    assert not adopted(third, model), "it has an owner"
    frozen = layered()
    frozen.ace.gamma.requires_grad_(False)
    assert len(torch.optim.SGD(frozen.layers.parameters(), lr=0.1).param_groups[0]["params"]) == 6


def test_gamma_stays_where_it_was_stepped() -> None:
    """A group with state cannot be removed: the state would stay in the optimizer and its checkpoints."""
    model = layered()
    first = torch.optim.Adam(model.layers.parameters(), lr=0.1)
    train(model, first, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert adopted(first, model)


def test_gamma_is_free_again_after_its_optimizer_is_gone() -> None:
    model = layered()
    first = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    reference = weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, second)
    assert status(model).steps == 3


def test_named_parameters_are_adopted_by_name() -> None:
    model = layered()
    try:
        optimizer = torch.optim.SGD(list(model.layers.named_parameters()), lr=0.1)
    except TypeError:
        pytest.skip("this torch has no named parameters in optimizers")
    (group,) = adopted(optimizer, model)
    assert group["param_names"][6] == "ace.gamma"
    assert len(group["param_names"]) == len(group["params"])


def split_parameters(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of a model's own layers, and its other weights."""
    own = [p for module in (model.lift, model.layers, model.head) for p in module.parameters()]
    return [p for p in own if p.ndim == 2], [p for p in own if p.ndim != 2]


def test_groups_stay_as_many_as_the_script_made() -> None:
    model = layered()
    matrices, vectors = split_parameters(model)
    optimizer = torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.1)
    _, others = optimizer.param_groups
    assert others in adopted(optimizer, model), "not where matrices are decayed"
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5])
    for _ in range(3):
        train(model, optimizer, 1)
        scheduler.step()
    assert status(model).steps == 3
    assert all(p in optimizer.state for p in model.ace.branches.parameters())


@pytest.mark.parametrize("steps", [0, 2])
def test_the_rest_of_the_parameters_may_be_added_later(steps: int) -> None:
    model = layered()
    optimizer = torch.optim.Adam(model.layers.parameters(), lr=0.01)
    train(model, optimizer, steps)
    first = {id(p) for p in model.layers.parameters()}
    optimizer.add_param_group({"params": (p for p in model.parameters() if id(p) not in first), "lr": 0.02})
    (group,) = adopted(optimizer, model)
    assert group["lr"] == (0.01 if steps else 0.02)
    assert sum(len(each["params"]) for each in optimizer.param_groups) == len(list(model.parameters()))
    train(model, optimizer)
    assert status(model).steps == steps + 3


def test_a_second_optimizer_loads_the_state_of_the_first() -> None:
    model = layered()
    first = torch.optim.Adam(model.layers.parameters(), lr=0.01)
    train(model, first)
    second = torch.optim.Adam(model.layers.parameters(), lr=0.01)
    second.load_state_dict(first.state_dict())
    train(model, second)
    assert status(model).steps == 6


class Matrices(torch.optim.SGD):
    """As torch.optim.Muon, which torch has since 2.9: an optimizer of matrices only."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("matrices only")


OF_MATRICES: list[Any] = [Matrices, getattr(torch.optim, "Muon", Matrices)]


@pytest.mark.parametrize("kind", OF_MATRICES, ids=["stand-in", "torch"])
@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_of_matrices_gets_matrices_only(first: bool, kind: Any) -> None:
    model = layered(preset="fit", loop="paced", mode="strict", frames="off", trace=False, budget=60)
    matrices, vectors = split_parameters(model)
    made = [kind(matrices, lr=0.1)] if first else []
    made += [torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.1)]
    made += [] if first else [kind(matrices, lr=0.1)]
    before = copy.deepcopy(model.ace.state_dict())
    x = torch.linspace(-1, 1, 36).reshape(12, 3)
    for _ in range(60):
        for optimizer in made:
            optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        for optimizer in made:
            optimizer.step()
        if status(model).steps == 3:
            assert not any(torch.equal(before[n], p) for n, p in model.ace.named_parameters()), "all are trained"
    assert status(model).landed
    after = copy.deepcopy(list(model.ace.parameters()))
    (model(x) - 1).square().mean().backward()
    for optimizer in made:
        optimizer.step()
    assert all(map(torch.equal, after, model.ace.parameters())), "no optimizer sees gradients of landed branches"


@pytest.mark.parametrize("kind", OF_MATRICES, ids=["stand-in", "torch"])
def test_an_optimizer_of_matrices_alone_is_refused_with_advice_that_works(kind: Any) -> None:
    model = layered(preset="fit", loop="paced", mode="strict", frames="off", trace=False, budget=60)
    optimizer = kind(split_parameters(model)[0], lr=0.1)
    with pytest.raises(AceError, match=r"no optimizer owns its gamma.*pass .* to another optimizer"):
        train(model, optimizer)
    other = torch.optim.AdamW(model.ace.parameters(), lr=0.01)
    (model(torch.randn(5, 3)) - 1).square().mean().backward()
    for each in (optimizer, other):
        each.step()
    assert status(model).steps == 1


class Around(torch.optim.Optimizer):
    """As SAM, an optimizer that shares its groups with the one inside."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inside = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.inside.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


def test_an_optimizer_that_shares_its_groups_with_another_keeps_gamma() -> None:
    model = layered()
    optimizer = Around(list(model.layers.parameters()), lr=0.01)
    assert adopted(optimizer, model)
    train(model, optimizer)
    assert status(model).steps == 3


def test_an_optimizer_built_before_attach_stays_an_error() -> None:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model)
    with pytest.raises(AceError, match="no optimizer owns its gamma.*after attach"):
        train(model, optimizer)


def test_what_one_model_reads_reaches_no_other() -> None:
    """Two attached models, the one inside the other's forward."""

    class Outer(DictModel):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.inner(x))

    with adapter(DictModel, dict_sites, ace.linear):
        inner = attach(DictModel())
        outer = attach(Outer(inner))
        outer(torch.randn(2, 4)).sum().backward()
        assert (inner.ace.gamma.grad != 0).all()
        assert (outer.ace.gamma.grad != 0).all()


def test_branches_that_add_themselves_share_an_input_only_if_it_is_the_same() -> None:
    """Two sites that read the first argument of their own modules read different tensors."""
    nodes = [ace.Site(name, shape_in=(4,), shape_out=(4,)) for name in ("0", "2")]
    with adapter(Two, lambda m: nodes, lambda site: Adding(4, 4)):
        torch.manual_seed(0)
        model = attach(Two().double())
        assert model.ace.prepared_by == {"0": "0", "2": "2"}
        one, two = (model.ace.branch(name) for name in ("0", "2"))
        x = torch.randn(3, 4, dtype=torch.float64)
        between = torch.tanh(x @ model[0].weight.T + model[0].bias + one(x))
        expected = between @ model[2].weight.T + model[2].bias + two(between)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


class Two(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Optional(nn.Module):
    """A layer that is called without one of the arguments it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Open()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Open(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, v: Tensor | None = None, **more: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("argument", "refusal"),
    [("w", "argument 'w' was not given"), ("v", "'layer' reads features of shape NoneType")],
)
def test_an_argument_that_is_not_given_is_refused(argument: str, refusal: str) -> None:
    site = ace.Site("layer", shape_in=(4,), shape_out=(4,), reads=ace.Tap(argument))
    with adapter(Optional, lambda m: [site]), pytest.raises(AceError, match=refusal):
        attach(Optional())(torch.randn(2, 4))
