"""Every check catches an adapter that was broken for it, and says where to look."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import ADAPTERS, Layered, LayeredAdapter

from ace_plugins.adapter import (
    O3,
    SO3,
    Example,
    GroupAction,
    Invariant,
    Node,
    Script,
    Site,
    Stem,
    Tap,
    Vectors,
    hookimpl,
    linear,
)
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import CHECKS, CheckError
from ace_plugins.testing.doctor import run_check
from ace_plugins.testing.kit import Kit, NotApplicable

GOOD = ADAPTERS["layered"]
VECTORS = ADAPTERS["vector_maps"]
PAIR = ADAPTERS["two_outputs"]


@contextmanager
def kit_of(adapter: Any) -> Iterator[Kit]:
    registry().add(adapter, "broken")
    try:
        kit = Kit("broken")
        yield kit
    finally:
        registry().remove("broken")


def with_hooks(base: Any, **hooks: Callable[..., Any]) -> Any:
    """An adapter like another, but for these hooks."""
    return type("Broken", (base,), {name: hookimpl(function) for name, function in hooks.items()})()


def with_branch(make: Callable[..., nn.Module], base: Any = VECTORS) -> Any:
    def ace_branch(self: Any, site: Node, model: Any) -> nn.Module:
        return make(site, model)

    return with_hooks(base, ace_branch=ace_branch)


def with_sites(*nodes: Node, base: Any = GOOD) -> Any:
    def ace_layers(self: Any, model: Any) -> Sequence[Node]:
        return nodes

    return with_hooks(base, ace_layers=ace_layers)


def site(name: str = "layers.0", module: str = "layers.0", **fields: Any) -> Site:
    return Site(**{"name": name, "module": module, "shape_in": (8,), "shape_out": (8,), **fields})


# Branches that are wrong, each in its own way.


class Shaped(nn.Module):
    """A linear branch of vector channels, wrong by what `spoil` does to its output."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.inner = linear(node)

    def forward(self, x: Tensor) -> Tensor:
        return self.spoil(self.inner(x))

    def spoil(self, y: Tensor) -> Tensor:
        return y


class Infinite(Shaped):
    def spoil(self, y: Tensor) -> Tensor:
        return y / 0


class Nothing(Shaped):
    def spoil(self, y: Tensor) -> Tensor:
        return 0 * y


class Counting(Shaped):
    seen = 0.0

    def spoil(self, y: Tensor) -> Tensor:
        self.seen += self.training
        return y * (1 + self.seen)


class Idle(Shaped):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.unused = nn.Linear(2, 2)


class Unfair(nn.Module):
    """Claims to train with the rows that the host names, and trains with all."""

    fits_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, -2) * self.scale


class Peeking(Unfair):
    """Adds itself, with the gamma of judges for all rows."""

    def prepare(self, read: Tensor) -> Tensor:
        return read

    def add_to(self, output: Tensor, gamma: Tensor, prepared: Tensor, fit: Tensor | None = None) -> Tensor:
        return output + (gamma if fit is None else gamma[1]) * self(prepared)

    def restore(self, output: Tensor) -> Tensor:
        return output


def unpicklable(node: Node, model: Any) -> nn.Module:
    class Local(Shaped):
        pass

    return Local(node)


def drawn_elsewhere(node: Node, model: Any) -> nn.Module:
    branch = linear(node)
    for parameter in branch.parameters():
        nn.init.constant_(parameter, random.random())
    return branch


def adds_to_the_model(node: Node, model: Any) -> nn.Module:
    model.extra = nn.Linear(2, 2)
    return linear(node)


def changes_the_weights(node: Node, model: Any) -> nn.Module:
    nn.init.zeros_(model.map_to_dir.weight)
    return linear(node)


# Hooks that are wrong.


def another_model(self: Any, seed: int) -> Example:
    return VECTORS().ace_example(seed, None)  # type: ignore[no-any-return]


def not_seeded(self: Any, seed: int) -> Example:
    return Example(Layered(), (torch.randn(16, 3),))


def forked_but_not_seeded(self: Any, seed: int) -> Example:
    generator = torch.Generator().manual_seed(random.randrange(10**6))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(generator.get_state())
        return not_seeded(self, seed)


def another_batch(self: Any, seed: int) -> Example:
    made = GOOD().ace_example(seed)
    return Example(made.model, (made.args[0] + random.random(),))


def seed_ignored(self: Any, seed: int) -> Example:
    return GOOD().ace_example(0)  # type: ignore[no-any-return]


def preset_that_draws(self: Any) -> dict[str, Any]:
    torch.rand(1)
    return {}


def layers_that_draw(self: Any, model: Any) -> Sequence[Node]:
    torch.rand(1)
    return GOOD().ace_layers(model)  # type: ignore[no-any-return]


def layers_that_change(self: Any, model: Any) -> Sequence[Node]:
    model.layers[1][1] = nn.ReLU()
    return GOOD().ace_layers(model)  # type: ignore[no-any-return]


class Patched(Layered):
    """Somebody's hook repairs it, which is for shims to do."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class PatchedAdapter(GOOD):  # type: ignore[misc,valid-type]
    model = Patched

    @hookimpl
    def ace_example(self, seed: int) -> Example:
        made = super().ace_example(seed)
        model = Patched()
        model.load_state_dict(made.model.state_dict())
        return Example(model, made.args)

    @hookimpl
    def ace_preset(self) -> dict[str, Any]:
        Patched.scale = 2.0
        return {}


def still_vectors(self: Any) -> GroupAction:
    return GroupAction(SO3, inputs={}, outputs=Vectors(axis=-2))


def invariant(self: Any) -> GroupAction:
    return GroupAction(O3, inputs={"x": Vectors()}, outputs=(Invariant(), Invariant()))


BROKEN: dict[str, list[tuple[Any, str, str]]] = {
    "hooks_answer": [
        (
            with_hooks(GOOD, ace_preset=lambda self: {"paper": {"dual_rate": 1}}),
            "adapter 'broken': ace_preset returned 'paper' with unknown setting 'dual_rate'",
            "",
        ),
        (
            with_hooks(GOOD, ace_preset=lambda self: {"fit": {"mode": "strickt"}}),
            "adapter 'broken': ace_preset returned 'fit' with unknown mode 'strickt'",
            "",
        ),
        (with_hooks(GOOD, ace_script=lambda self, argv: Script(3)), "ace_script .*for no script", "argv"),
        (with_hooks(GOOD, ace_demo=lambda self: 3), "adapter 'broken': ace_demo returned int 3, expected", ""),
    ],
    "example_is_claimed": [
        (with_hooks(GOOD, ace_example=another_model), "toy:VectorMaps.*expected toy:Layered", "models"),
    ],
    "example_repeats": [
        (with_hooks(GOOD, ace_example=not_seeded), "global random stream", "ace_example"),
        (
            with_hooks(GOOD, ace_example=forked_but_not_seeded),
            "same seed .* weights",
            "ace_example",
        ),
        (with_hooks(GOOD, ace_example=another_batch), "same seed .* batch: args.0", "args and kwargs"),
        (with_hooks(GOOD, ace_example=seed_ignored), "another seed gives the same weights", "ace_example, seed"),
    ],
    "sites_are_named_for_people": [
        (with_sites(site(), site()), "2 nodes are named 'layers.0'", "ace_layers, Site 'layers.0', name"),
        (with_sites(site(" first")), "' first' has spaces around it", "Site ' first', name"),
        (
            with_sites(Stem("lift", Tap("x", ""), (3,), (8,)), site()),
            "nothing reads stem 'lift'",
            "ace_layers, Stem 'lift', name",
        ),
    ],
    # The engine finds most of these; its errors name the site and the field themselves.
    "sites_fit_the_forward": [
        (with_sites(site(module="layer")), "'layers.0' names submodule 'layer'", ""),
        (with_sites(site(module="layers")), "layers is not called", "'layers.0', module"),
        (with_sites(site(shape_out=(9,))), r"'layers.0': .*\(16, 9\), expected \(16, 8\)", ""),
        (with_sites(site(shape_in=(9,))), r"'layers.0' reads .*shape_in \(9,\)", ""),
        (with_sites(site(reads=Tap("y"))), "'layers.0' reads argument 'y'", ""),
        (with_sites(site(reads=Tap("x", "layers"))), "'layers.0' reads argument 'x'", ""),
        (with_sites(Site("layers.0.x", "layers.0", (3,), (3,)), base=PAIR), "'layers.0.x': .*tuple.*output", ""),
        (with_sites(Site("layers.0.x", "layers.0", (3,), (3,), output=3), base=PAIR), "layers.0: .*'3'", ""),
        (
            with_sites(Site("layers.0.x", "layers.0", (4,), (3,), reads=Tap("h"), output=2), base=PAIR),
            r"'layers.0.x': .*\(16, 3\), expected \(16, 4\)",
            "",
        ),
        (with_sites(Site("layers.0.x", "layers.0", (3,), (3,), reads=Tap("v"), output=0), base=PAIR), "", ""),
        (with_branch(lambda site, model: nn.Linear(4, 5)), "its branch returns shape", ""),
    ],
    "attach_moves_no_random_numbers": [
        (with_hooks(GOOD, ace_preset=preset_that_draws), r"random stream \(mode off\)", "ace_preset"),
        (with_hooks(GOOD, ace_layers=layers_that_draw), r"random stream \(mode strict\)", "ace_layers"),
    ],
    "attach_leaves_the_weights": [
        (with_branch(changes_the_weights), "attach changes upstream's map_to_dir.weight", "ace_branch"),
        (with_branch(adds_to_the_model), "attach adds extra.weight, extra.bias to upstream", "ace_branch"),
    ],
    "attach_repeats": [
        (with_branch(drawn_elsewhere), "same seed .* branches", "ace_branch"),
    ],
    "branches_are_their_own": [
        (
            with_branch(lambda site, model: model.map_to_dir),
            "the branch of 'map_to_feat' shares .*map_to_dir.weight",
            "ace_branch, site 'map_to_feat'",
        ),
    ],
    "gamma_zero_is_upstream": [
        (
            with_branch(lambda site, model: Infinite(site)),
            r"bit for bit \(training=True\) \(first at site 'map_to_feat'\)",
            "ace_branch",
        ),
    ],
    "eval_is_upstream": [
        (with_hooks(GOOD, ace_layers=layers_that_change), r"\(first at site 'layers.1'\)", "ace_layers"),
    ],
    "eval_keeps_the_branches": [
        (with_branch(lambda site, model: Nothing(site)), "no branch has an effect", "ace_branch"),
    ],
    "off_is_upstream": [
        (PatchedAdapter(), "mode off trains with losses", "ace_shims and ace_preset"),
    ],
    "every_site_learns": [
        (
            with_branch(lambda site, model: Nothing(site)),
            "gamma of 'map_to_feat', 'map_to_dir' gets no gradient: .*no effect",
            "ace_layers, Site 'map_to_feat', output: correct it, or leave the site out",
        ),
        (with_sites(site(), site("layers", "layers")), "'layers' gets no gradient: layers is not called", "module"),
        (with_branch(lambda site, model: Infinite(site)), "gradient of gamma .* nan", "site 'map_to_feat'"),
    ],
    "every_branch_learns": [
        (
            with_branch(lambda site, model: Idle(site)),
            "unused.weight, unused.bias in the branch of 'map_to_feat' get no gradient",
            "ace_branch, site 'map_to_feat'",
        ),
    ],
    "samples_judge_or_train": [
        (
            with_branch(lambda site, model: Unfair()),
            "samples that judge gamma train scale in the branch of 'map_to_feat'",
            "ace_branch, site 'map_to_feat'",
        ),
        (with_branch(lambda site, model: Peeking()), "gamma gets a gradient", "ace_branch"),
    ],
    "training_moves_the_duals": [
        (
            with_branch(lambda site, model: Infinite(site)),
            "strict: after 3 steps gamma of 'map_to_feat' is .*: the loss is not finite",
            "ace_branch, site 'map_to_feat'",
        ),
    ],
    "project_gives_upstream_back": [
        (with_branch(adds_to_the_model), "project leaves other keys or shapes: extra.bias", "ace_branch"),
    ],
    "copies_are_independent": [
        (with_branch(unpicklable), "a pickle of the model fails: .*Local", "at module level"),
    ],
    "checkpoints_resume": [
        (with_branch(lambda site, model: Counting(site)), "resumed model", "nor a buffer"),
    ],
    "checkpoints_export": [
        (with_branch(adds_to_the_model), "upstream does not load .*extra.weight", "ace_branch"),
    ],
    "upstream_is_symmetric": [
        (
            with_hooks(VECTORS, ace_group_action=still_vectors),
            r"the relative equivariance error under SO\(3\) is .*; output has the largest",
            "ace_group_action: the group",
        ),
        (with_hooks(PAIR, ace_group_action=invariant), "; output.0 has the largest", "outputs"),
    ],
    "frames_leave_upstream": [
        (with_hooks(VECTORS, ace_group_action=still_vectors), "output of f_eq", "ace_group_action"),
    ],
    "branches_break_the_symmetry": [
        (LayeredAdapter(), "the branches keep the symmetry", "not invariant"),
    ],
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_catches_what_it_is_for(check: str, request: pytest.FixtureRequest) -> None:
    if check == "importing_is_light":
        pytest.skip("the test below")
    request.addfinalizer(lambda: setattr(Patched, "scale", 1.0))
    for adapter, reason, look_at in BROKEN[check]:
        with kit_of(adapter) as kit:
            found = run_check(check, kit)
            if not reason and not look_at:  # beside the broken ones, one that is not
                assert found is None
                continue
            assert isinstance(found, CheckError)
            assert re.search(reason, found.reason), found.reason
            assert look_at in found.look_at
            assert "\n" not in str(found)


def test_importing_torch_at_the_top_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    check = CHECKS["importing_is_light"]
    kit = Kit("layered")
    with pytest.raises(NotApplicable, match="registered as an object"):
        check(kit)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    kit.plugin = replace(kit.plugin, target="toy:ADAPTERS", distribution="ace-toy")
    with pytest.raises(CheckError, match="importing toy imports torch; look at the top of toy"):
        check(kit)
    kit.plugin = replace(kit.plugin, target="nowhere.plugin")
    with pytest.raises(CheckError, match="importing nowhere.plugin .* fails: ModuleNotFoundError: No module named"):
        check(kit)
    kit.plugin = replace(kit.plugin, target="ace_plugins.contract.sites")
    check(kit)


@pytest.mark.parametrize("adapter", ["layered", "two_outputs", "vector_maps"])
@pytest.mark.parametrize("check", CHECKS)
def test_sound_adapters_pass(check: str, adapter: str) -> None:
    CHECKS[check](Kit(adapter))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("check", ["every_site_learns", "every_branch_learns"])
def test_a_single_sample_is_enough(check: str, seed: int) -> None:
    """In mode auto it would either judge or train."""

    class Single(GOOD):  # type: ignore[misc,valid-type]
        @hookimpl
        def ace_preset(self) -> dict[str, Any]:
            return {}

        @hookimpl
        def ace_example(self, seed: int) -> Example:
            made = GOOD().ace_example(seed)
            return Example(made.model, tuple(tensor[:1] for tensor in made.args))

    with kit_of(Single()) as kit:
        kit.seed = seed
        CHECKS[check](kit)


def test_without_an_action_there_is_no_symmetry_to_judge() -> None:
    class Mute(ADAPTERS["free"]):  # type: ignore[misc,valid-type]
        pass

    with kit_of(Mute()) as kit:
        for name in ("upstream_is_symmetric", "frames_leave_upstream", "branches_break_the_symmetry"):
            with pytest.raises(NotApplicable, match="does not implement ace_group_action"):
                CHECKS[name](kit)
