"""The battery every adapter must pass, this project's own and third parties' alike.

    from ace_plugins.testing import check_adapter
    def test_my_adapter():
        check_adapter("mine")

Each check is a function ``check_*(kit)`` and runs on its own; `check_adapter` runs them all and reports every
failure, not the first.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Site, Stem
from ..contract.upstreams import Example, class_path
from ..engine.attaching import project
from ..engine.checkpoints import export
from ..engine.measuring import equivariance_error, use_branches
from ..engine.state import Ace
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..report.status import status
from ..symmetry.measuring import Call, EquivarianceError
from .importable import make_importable

SYMMETRIC = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative equivariance error of plain upstream."""


@dataclass(frozen=True)
class Failure:
    """A check that did not hold, and why."""

    check: str
    reason: str


class AdapterCheckError(AssertionError):
    """An adapter breaks the contract; ``failures`` says where."""

    def __init__(self, adapter: str, failures: list[Failure]) -> None:
        self.failures = failures
        reasons: dict[str, list[str]] = {}
        for failure in failures:
            reasons.setdefault(failure.reason, []).append(failure.check)
        # One cause often fails many checks: each reason once.
        lines = "".join(f"\n  {', '.join(checks)}: {reason}" for reason, checks in reasons.items())
        super().__init__(f"adapter {adapter!r} fails {len(failures)} of {len(CHECKS)} checks:{lines}")


FRAMES = 1e-3
"""How far f_eq may be from itself in another frame, relative: the tolerance of float32."""
PLAIN = {"trace": False, "tell": False, "frames": "off"}
"""Without what is random by design, so that runs can be compared bit for bit."""


class Kit:
    """What the checks work with: fresh examples of one adapter, and one way to train them."""

    def __init__(self, adapter: str, seed: int = 0) -> None:
        self.plugin: Plugin = registry().adapter(adapter)
        self.seed = seed

    def example(self) -> Example:
        return self.plugin.example(self.seed)

    def attached(self, **config: Any) -> tuple[Any, Example]:
        example = self.example()
        torch.manual_seed(self.seed)
        return attach(example.model, self.plugin.name, **{**PLAIN, **config}), example

    @staticmethod
    def tensors(output: Any) -> list[Tensor]:
        if isinstance(output, Tensor):
            return [output]
        values = output.values() if isinstance(output, dict) else output
        # Dicts of whole batches hold indices too, and empty tensors for what there is not.
        return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]

    def run(self, model: nn.Module, example: Example) -> list[Tensor]:
        return self.tensors(model(*copy.deepcopy(example.args), **copy.deepcopy(dict(example.kwargs))))

    def same(self, *sides: tuple[nn.Module, Example]) -> bool:
        """Whether models give the same, down to the last bit, for the same random numbers (of dropout)."""
        outputs = []
        for model, example in sides:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed)
                outputs.append(self.run(model, example))
        return all(_same(outputs[0], other) for other in outputs[1:])

    def loss(self, model: nn.Module, example: Example) -> Tensor:
        return torch.stack([(tensor - 1).square().mean() for tensor in self.run(model, example)]).sum()

    def train(self, model: nn.Module, example: Example, steps: int = 3, lr: float = 1e-3) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss(model, example)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _different(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [name for name in one if isinstance(one[name], Tensor) and not torch.equal(one[name], two[name])]


def _layout(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def check_example_is_claimed_and_repeatable(kit: Kit) -> None:
    one, two = kit.example(), kit.example()
    assert registry().claiming(one.model).name == kit.plugin.name, (
        f"{class_path(type(one.model))} is not among the models ace_upstream names"
    )
    before = torch.random.get_rng_state()
    same = _same(kit.run(one.model.eval(), one), kit.run(two.model.eval(), two))
    assert same, "ace_example(seed) gives another model or batch each time"
    kit.example()
    assert torch.equal(before, torch.random.get_rng_state()), "ace_example moves the global random stream"


def check_attach_moves_no_random_numbers(kit: Kit) -> None:
    example = kit.example()
    torch.manual_seed(kit.seed)
    before = torch.random.get_rng_state()
    weights = copy.deepcopy(example.model.state_dict())
    attach(example.model, kit.plugin.name, trace=False, tell=False)
    assert torch.equal(before, torch.random.get_rng_state()), "attach moves the random stream"
    changed = _different(weights, example.model.state_dict())
    assert not changed, f"attach changes upstream's weights: {changed}"


def check_attach_is_repeatable(kit: Kit) -> None:
    one, two = (kit.attached()[0].state_dict() for _ in range(2))
    assert not _different(one, two), f"the same seed gives other values: {_different(one, two)}"


def check_gamma_zero_is_upstream(kit: Kit) -> None:
    plain = kit.example()
    model, example = kit.attached()
    with torch.no_grad():
        model.ace.gamma.zero_()
    for mode in (True, False):
        with use_branches(model, True):
            assert kit.same((plain.model.train(mode), plain), (model.train(mode), example)), (
                f"gamma = 0 does not give upstream's output bit for bit (training={mode})"
            )


def check_eval_mode(kit: Kit) -> None:
    plain = kit.example()
    expected = kit.run(plain.model.eval(), plain)
    model, example = kit.attached(mode="strict")
    assert _same(expected, kit.run(model.eval(), example)), "strict: model.eval() is not upstream's output"
    model, example = kit.attached(mode="resilient", spectral_norm=True)
    assert not _same(expected, kit.run(model.eval(), example)), "resilient: model.eval() leaves the branches out"


def check_off_is_upstream(kit: Kit) -> None:
    plain, off = kit.example(), kit.example()
    torch.manual_seed(kit.seed)
    expected = kit.train(plain.model, plain)
    torch.manual_seed(kit.seed)
    attach(off.model, kit.plugin.name, mode="off")
    assert kit.train(off.model, off) == expected, "mode off gives other losses than upstream"
    assert _layout(off.model.state_dict()) == _layout(plain.model.state_dict()), "mode off changes the state_dict"


def check_every_part_learns(kit: Kit) -> None:
    model, example = kit.attached()
    ace: Ace = model.ace
    kit.loss(model.train(), example).backward()  # type: ignore[no-untyped-call]
    assert ace.gamma.grad is not None
    silent = [site.name for site, g in zip(ace.sites, ace.gamma.grad.tolist(), strict=True) if g == 0]
    assert not silent, f"gamma of {silent} gets no gradient: its branch has no effect on the output"
    lonely = [name for name, p in ace.branches.named_parameters() if p.requires_grad and p.grad is None]
    assert not lonely, f"branch parameters get no gradient: {lonely}"


def check_random_frames_leave_upstream_as_it_is(kit: Kit) -> None:
    if not kit.plugin.has("ace_group_action"):
        return
    plain = kit.example()
    model, example = kit.attached(mode="strict", frames="on")
    with torch.no_grad():
        model.ace.gamma.zero_()
    action = model.ace.action
    outputs = []
    for side, of in ((plain.model, plain), (model, example)):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(kit.seed)
            output = side.train()(*copy.deepcopy(of.args), **copy.deepcopy(dict(of.kwargs)))
            outputs.append({name: tensor.detach() for name, tensor in action.compared(output).items()})
    for name, expected in outputs[0].items():
        off = float((outputs[1][name] - expected).norm())
        assert off <= FRAMES * (1e-30 + float(expected.norm())), (
            f"{name} of f_eq differs by {off:.1e} in a random frame: ace_group_action does not fit the model"
        )


def check_training_moves_the_duals(kit: Kit) -> None:
    for mode in ("strict", "bounded", "resilient"):
        model, example = kit.attached(mode=mode, loop="printed", dual_lr=0.01, spectral_norm=mode != "strict")
        kit.train(model.train(), example)
        now = status(model)
        assert now.steps == 3, f"{mode}: {now.steps} dual steps after 3 optimizer steps"
        still = [site.name for site in now.sites if site.lambda_ == 0]
        assert not still, f"{mode}: lambda of {still} did not move from gamma = 1"


def check_project_gives_upstream_back(kit: Kit) -> None:
    plain = kit.example()
    model, example = kit.attached(mode="strict")
    kit.train(model.train(), example)
    expected = kit.run(model.eval(), example)
    project(model)
    assert _layout(model.state_dict()) == _layout(plain.model.state_dict()), "project leaves other keys or shapes"
    assert _same(expected, kit.run(model, example)), "project changes f_eq"
    left = [
        n for n, m in model.named_modules() for h in m._forward_hooks.values() if "ace_plugins" in type(h).__module__
    ]
    assert not left, f"project leaves hooks on {left}"


def check_copies_are_independent(kit: Kit) -> None:
    model, example = kit.attached()
    for how, twin in (("deepcopy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
        before = copy.deepcopy(model.state_dict())
        assert kit.same((copy.deepcopy(model).train(), example), (copy.deepcopy(twin).train(), example)), (
            f"a {how} of the model gives other outputs"
        )
        kit.train(twin.train(), example)
        assert status(twin).steps == 3, f"a {how} of the model trains without its duals"
        assert not _different(before, model.state_dict()), f"training a {how} changes the original"


def check_checkpoints(kit: Kit) -> None:
    model, example = kit.attached(mode="strict")
    kit.train(model.train(), example)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, _ = kit.attached(mode="strict")
    again.load_state_dict(state)
    assert status(again) == status(model), "gamma, lambda or u are lost in a checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = kit.example().model
        plain.load_state_dict(export(state), strict=True)
        assert _same(kit.run(plain.eval(), example), kit.run(model.eval(), example)), "export is not f_eq"
        fresh, _ = kit.attached(mode="strict")
        fresh.load_state_dict(plain.state_dict(), strict=True)
    assert _same(kit.run(fresh.eval(), example), kit.run(plain.eval(), example)), "a plain checkpoint loads wrong"


def check_symmetry(kit: Kit) -> None:
    """Plain upstream keeps the symmetry, and the branches break it: else there is nothing to constrain."""

    dtype = _precision(kit)

    def error(gamma: float) -> EquivarianceError:
        model, example = kit.attached()
        model.to(dtype)
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        return equivariance_error(model, _as(dtype, example), branches_on=True)

    zero, one = error(0.0), error(1.0)
    assert zero.relative < SYMMETRIC[dtype], (
        f"at gamma = 0 the relative equivariance error is {zero.relative:.3g}, not {SYMMETRIC[dtype]:g}"
    )
    assert one.relative > 1e-6, f"at gamma = 1 the branches keep the symmetry (relative error {one.relative:.3g})"


def _precision(kit: Kit) -> torch.dtype:
    """Double where upstream can: some compute parts in single precision whatever they are given."""
    example = kit.example()
    call = _as(torch.float64, example)
    try:
        example.model.double()(*call.args, **call.kwargs)
    except RuntimeError:
        return torch.float32
    return torch.float64


def _as(dtype: torch.dtype, example: Example) -> Call:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        # A PyG Data object maps a function over its tensors.
        return copy.copy(value).apply(cast) if hasattr(value, "apply") else value

    return Call(tuple(map(cast, example.args)), {name: cast(value) for name, value in example.kwargs.items()})


def check_sites_are_named_for_people(kit: Kit) -> None:
    nodes = kit.plugin.call("ace_layers", model=kit.example().model) or ()
    names = [node.name for node in nodes]
    assert len(set(names)) == len(names), f"names repeat: {names}"
    assert all(name.isprintable() and name.strip() == name and name for name in names), f"odd names: {names}"
    read = {node.reads for node in nodes} | {node.through for node in nodes if isinstance(node, Site)}
    unread = {node.name for node in nodes if isinstance(node, Stem)} - read
    assert not unread, f"stems nothing reads: {sorted(unread)}"


CHECKS: tuple[Callable[[Kit], None], ...] = tuple(
    check for name, check in sorted(globals().items()) if name.startswith("check_") and callable(check)
)


def check_adapter(name: str, *, seed: int = 0, checkout: str | os.PathLike[str] | None = None) -> None:
    """Run the whole battery on an adapter by its entry point name; raise with every failure there is.

    ``checkout`` is where its upstream is, if that is one people clone (or ``ACE_UPSTREAM_<NAME>`` says it).
    """
    plugin = registry().adapter(name)
    make_importable(plugin, None if checkout is None else Path(checkout))
    REPAIRS.offer_stand_ins(plugin)
    REPAIRS.apply(plugin, "cpu")  # where the examples are
    kit = Kit(name, seed)
    failures = []
    for check in CHECKS:
        try:
            check(kit)
        except Exception as error:
            text = " ".join(str(error).split()) or "no message"
            reason = text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
            failures.append(Failure(check.__name__, reason))
    if failures:
        raise AdapterCheckError(name, failures)
