"""Every setting of ACE, with its default, its range and the words that explain it."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass

from ..errors import ConfigError, one_of

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

LARGEST = 1e30
"""Past this a number is as good as infinite: gamma and the duals are float32 in most models."""
MODES = ("strict", "bounded", "resilient", "off")
DUAL_OPTIMIZERS = ("sgd", "adam", "nupi")
EVAL_BRANCHES = ("auto", "on", "off")
DEVICES = ("auto", "cpu")
UNBOUNDED = (
    "the branches stay in the deployed model and nothing bounds them, so that a branch can grow as its gamma shrinks: "
    "gamma and u do not say how far the model is from equivariant, and no bound on its equivariance error holds"
)
"""What it costs to deploy branches that are not bounded."""


def _setting(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """How ACE trains a model. Every field can be given to ``attach``, ``patched`` and ``ace-patch run``."""

    mode: str = _setting(
        "strict", "strict: gamma = 0; bounded: |gamma| <= epsilon; resilient: |gamma| <= u, u learned; off"
    )
    dual_optimizer: str = _setting("sgd", "what moves lambda: sgd (as printed), adam (as the authors ran), nupi")
    dual_lr: float | str = _setting(
        "1x", "dual learning rate: a number, or a multiple of the live one of gamma's parameter group: 1x"
    )
    gamma_init: float = _setting(1.0, "where every gamma starts")
    gamma_lr: float = _setting(1.0, "gamma's learning rate, as a multiple of its parameter group's live one")
    gamma_weight_decay: bool = _setting(False, "let the optimizer's weight decay act on gamma too")
    rho: float = _setting(1.0, "resilient: price of slack, rho / 2 |u|^2")
    u_init: float = _setting(0.0, "resilient: where the slack u of every site starts")
    epsilon: float = _setting(0.1, "bounded: the bound on |gamma|")
    augmented: float = _setting(0.0, "augmented Lagrangian constant c: adds c slack^2, which damps the swing")
    adam_beta1: float = _setting(0.9, "adam: decay of the mean of the constraint")
    adam_beta2: float = _setting(0.999, "adam: decay of its square")
    nupi_kp: float = _setting(1.0, "nupi: proportional gain")
    nupi_ki: float = _setting(1.0, "nupi: integral gain")
    nupi_nu: float = _setting(0.0, "nupi: smoothing of the constraint")
    land_at: int = _setting(0, "strict: the step after which gamma is 0 for good; 0 for never")
    spectral_norm: bool = _setting(False, "divide every linear map of the branches by its spectral norm")
    eval_branches: str = _setting("auto", "branches in model.eval(): auto (strict off, others on), on, off")
    device: str = _setting("auto", "cpu: where upstream insists on a GPU, run it on the CPU; auto: as upstream has it")
    shims: bool = _setting(True, "repair what upstream needs and today's stack has not")
    trace: bool = _setting(True, "write gamma, lambda and u to .ace/runs/")
    trace_every: int = _setting(10, "steps between two lines of the trace")
    error_every: int = _setting(
        0, "steps between two measurements of the equivariance error, which go to the trace; 0 for none"
    )

    def __post_init__(self) -> None:
        """Say everything that is wrong at once, so that one look mends it."""
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems=problems)

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name, known in (
            ("mode", MODES),
            ("dual_optimizer", DUAL_OPTIMIZERS),
            ("eval_branches", EVAL_BRANCHES),
            ("device", DEVICES),
        ):
            if getattr(self, name) not in known:
                yield name, one_of(name, getattr(self, name), known)
        try:
            parse_rate(self.dual_lr)
        except ConfigError as error:
            yield "dual_lr", str(error)
        yield from self._range("gamma_init", -math.inf, math.inf)
        for name in ("gamma_lr", "augmented", "nupi_kp", "nupi_ki", "u_init"):
            yield from self._range(name, 0.0, math.inf)
        for name in ("rho", "epsilon"):
            yield from self._range(name, 0.0, math.inf, positive=True)
        for name in ("adam_beta1", "adam_beta2", "nupi_nu"):
            yield from self._range(name, 0.0, 1.0)
        for name, least in (("land_at", 0), ("trace_every", 1), ("error_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
                yield name, f"{name} {value!r}: expected an integer of at least {least}"
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool) and not isinstance(getattr(self, field.name), bool):
                yield field.name, f"{field.name} {getattr(self, field.name)!r}: expected true or false"

    def _range(self, name: str, low: float, high: float, *, positive: bool = False) -> Iterator[tuple[str, str]]:
        value: Any = getattr(self, name)
        number = not isinstance(value, bool) and isinstance(value, numbers.Real) and _moderate(value)
        if not number or not low <= value < high or (positive and value == 0):
            bounds = "" if low == -math.inf else " above 0" if positive else f" of at least {low:g}"
            below = f" and below {high:g}" if high != math.inf else ""
            yield name, f"{name} {value!r}: expected a finite number{bounds}{below}"

    def has_landed(self, steps: int) -> bool:
        """Whether after so many steps gamma is 0 for good; in other modes than strict it need not be 0."""
        return self.mode == "strict" and 0 < self.land_at <= steps

    def traces(self, step: int) -> bool:
        """Whether this step gets a line of the trace."""
        return self.trace and _due(step, self.trace_every)

    def measures(self, step: int) -> bool:
        """Whether the equivariance error is measured after this step."""
        return self.trace and self.error_every > 0 and _due(step, self.error_every)

    @property
    def deploys_branches(self) -> bool:
        """Whether the branches are part of the model that training is for."""
        return self.mode in ("bounded", "resilient")

    @property
    def cautions(self) -> tuple[str, ...]:
        """What these settings cost, where that is more than people may think."""
        if self.deploys_branches and not self.spectral_norm:
            return (f"mode {self.mode!r} without spectral_norm: {UNBOUNDED}; set spectral_norm = true",)
        return ()

    def dual_rate(self, primal: Any) -> Any:
        """The dual learning rate beside a live primal one (a float or a tensor)."""
        value, relative = parse_rate(self.dual_lr)
        return value * primal if relative else value

    @property
    def branches_in_eval(self) -> bool:
        """Whether ``model.eval()`` keeps the branches: in strict mode the model that counts is f_eq."""
        return self.mode != "strict" if self.eval_branches == "auto" else self.eval_branches == "on"


def _due(step: int, every: int) -> bool:
    return step == 1 or step % every == 0


def _moderate(value: Any) -> bool:
    return bool(-LARGEST <= value <= LARGEST)


SETTINGS = {field.name: field for field in dataclasses.fields(Config)}


def parse_rate(rate: object) -> tuple[float, bool]:
    """(value, is it a multiple of the live primal rate): 8e-4 is absolute, "1x" a multiple."""
    text = str(rate).strip().lower()
    relative = text.endswith("x")
    try:
        if isinstance(rate, bool):
            raise ValueError
        value = float(text[:-1] if relative else text)
    except ValueError:
        raise ConfigError(f"dual_lr {rate!r}: expected a number, or a multiple such as '1x'") from None
    if not 0 <= value <= LARGEST:
        raise ConfigError(f"dual_lr {rate!r}: expected a finite number of at least 0, or a multiple such as '1x'")
    return value, relative


def build(settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """A config from a preset and what the user set over it; ``preset`` names it, "none" is none."""
    given = dict(settings)
    name = given.pop("preset", None)
    base: Mapping[str, Any] = {}
    presets = presets or {}
    if name not in (None, "none"):
        if not isinstance(name, str) or name not in presets:
            raise ConfigError(problems=[("preset", one_of("preset", name, [*presets, "none"]))])
        base = presets[name]
    elif name is None:
        base = presets.get("paper", {})
    unknown = [key for key in given if key not in SETTINGS]
    if unknown:
        raise ConfigError(problems=[(key, one_of("setting", key, [*SETTINGS, "preset"])) for key in unknown])
    return Config(**{**base, **given})
