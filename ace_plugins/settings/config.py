"""Every setting of ACE, with its default, its range and the words that explain it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AceDeprecationWarning, AceWarning, ConfigError, one_of
from .fields import Budget, Choice, Flag, Kind, Number, NumberOrAuto, Perhaps, Price, Rate

FIT = "fit"
"""The preset that is used unless another is named: the loop that fits the run. Every adapter has it."""
SHORT = "short"
"""What `FIT` has taken the place of."""
NONE = "none"
"""In place of a preset's name: no preset."""
LOGGERS = ("tensorboard", "wandb", "trackio")
"""What `Config.log` can name. Each is also the package it needs, and the extra of ace-plugins that installs it."""
UNBOUNDED = (
    "the branches stay in the deployed model and nothing bounds them, so that a branch can grow as its gamma shrinks: "
    "gamma and u do not say how far the model is from equivariant, and no bound on its equivariance error holds"
)
"""What it costs to deploy branches that are not bounded."""
FORMER_LOOPS = {"printed": "paper", "fitted": "paced"}
"""Former names of the loops -> their names now. They are accepted with a warning."""
REMOVED = frozenset({"nupi_kp", "nupi_ki", "nupi_nu"})
"""Settings of earlier versions that have no effect on reading a trace."""
RATE = Rate()
PRICE = Price()
BUDGET = Budget()
COUNT = Number(low=0, whole=True)


def _setting(default: Any, kind: Kind, text: str, *, paper_only: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "help": text, "paper_only": paper_only})


@dataclass(frozen=True)
class Config:
    """How ACE trains a model. Every field can be given to ``attach``, ``patched`` and ``ace-patch run``."""

    mode: str = _setting(
        "strict",
        Choice(("strict", "bounded", "resilient", "scheduled", "off")),
        "strict: gamma = 0; bounded: |gamma| <= epsilon; resilient: |gamma| <= u, u learned; scheduled: gamma goes up "
        "and down with the budget, whatever the data say; off",
    )
    loop: str = _setting(
        "paper",
        Choice(("paced", "paper")),
        "paced: gamma's pace follows from the run's budget and its loss; paper: the paper's algorithms, exactly",
    )
    budget: int | str = _setting(
        "auto",
        BUDGET,
        "paced: how long the run is, in optimizer steps or as '600 epochs'; auto: detected from the script",
    )
    horizon: float | str = _setting(
        "auto",
        NumberOrAuto(positive=True, high=1.0),
        "paced: the share of the budget by which gamma arrives; auto: 0.25, in strict mode 100 epochs at most",
    )
    frames: str = _setting(
        "auto",
        Choice(("auto", "on", "off")),
        "train the branches under random group elements; auto: in strict mode of the paced loop, and by schedule",
    )
    dual_optimizer: str = _setting(
        "sgd",
        Choice(("sgd", "adam"), hint="to damp oscillations set augmented above 0, or loop to 'paced'"),
        "what moves lambda: sgd (as in the paper), adam (as the authors ran)",
        paper_only=True,
    )
    dual_lr: float | str = _setting(
        "1x",
        RATE,
        "dual learning rate: a number, or a multiple of the live one of gamma's parameter group: 1x",
        paper_only=True,
    )
    gamma_init: float | str = _setting(
        "auto", NumberOrAuto(), "where every gamma starts; auto: 0.1 in the paced loop, 1 in the paper's"
    )
    gamma_lr: float = _setting(
        1.0, Number(low=0), "gamma's learning rate, as a multiple of its parameter group's live one", paper_only=True
    )
    gamma_weight_decay: bool = _setting(
        False, Flag(), "let the optimizer's weight decay act on gamma too", paper_only=True
    )
    rho: float | str = _setting(
        "1x", PRICE, "resilient: price of slack, rho / 2 |u|^2; 1x: as much as the loss's gradient at gamma"
    )
    u_init: float = _setting(0.0, Number(low=0), "resilient: where the slack u of every site starts", paper_only=True)
    epsilon: float = _setting(0.1, Number(positive=True), "bounded: the bound on |gamma|")
    augmented: float = _setting(
        0.0, Number(low=0), "augmented Lagrangian constant c: adds c slack^2, which damps the swing", paper_only=True
    )
    adam_beta1: float = _setting(
        0.9, Number(low=0, high=1), "adam: decay of the mean of the constraint", paper_only=True
    )
    adam_beta2: float = _setting(0.999, Number(low=0, high=1), "adam: decay of its square", paper_only=True)
    land_at: int = _setting(0, COUNT, "strict: the step after which gamma is 0 for good; 0 for never", paper_only=True)
    spectral_norm: bool | str = _setting(
        "auto",
        Perhaps(),
        "divide every linear map of the branches by its spectral norm; auto: in the paced loop, where branches stay",
    )
    eval_branches: str = _setting(
        "auto", Choice(("auto", "on", "off")), "branches in model.eval(): auto (strict off, others on), on, off"
    )
    device: str = _setting(
        "auto",
        Choice(("auto", "cpu")),
        "cpu: where upstream insists on a GPU, run it on the CPU; auto: as upstream has it",
    )
    shims: bool = _setting(True, Flag(), "repair what upstream needs and today's stack has not")
    tell: bool = _setting(
        True,
        Flag(),
        "say on stderr what is attached, and at the end what came of it; ACE_QUIET=1 is for whole processes",
    )
    trace: bool = _setting(True, Flag(), "write gamma, lambda and u to .ace/runs/")
    trace_every: int = _setting(10, Number(low=1, whole=True), "steps between two lines of the trace")
    error_every: int = _setting(
        0,
        COUNT,
        "steps between two measurements of the equivariance error, which go to the trace and the log; 0 for none",
    )
    log: str = _setting(
        NONE,
        Choice((NONE, *LOGGERS)),
        "also log gamma, lambda and u, every trace_every steps; into the script's own run of wandb or trackio, if any",
    )

    def __post_init__(self) -> None:
        """Translate the former names of the loops, and report every problem at once."""
        if isinstance(self.loop, str) and self.loop in FORMER_LOOPS:
            text = f"loop {self.loop!r} is now called {FORMER_LOOPS[self.loop]!r}; use the new name"
            warnings.warn(text, AceDeprecationWarning, stacklevel=3)
            object.__setattr__(self, "loop", FORMER_LOOPS[self.loop])
        told = {name: kind.problem(name, getattr(self, name)) for name, kind in KINDS.items()}
        problems = [(name, text) for name, text in told.items() if text]
        if problems:
            raise ConfigError(problems=problems)

    @property
    def summary(self) -> str:
        """The mode and what paces it, for people."""
        if self.paced:
            return f"mode {self.mode}, budget {self.budget}"
        return f"mode {self.mode}, dual lr {self.dual_lr} ({self.dual_optimizer})"

    def has_landed(self, steps: int) -> bool:
        """Whether after so many steps gamma is 0 for good; in other modes than strict it need not be 0."""
        return self.mode == "strict" and 0 < self.land_at <= steps

    def may_wait(self, step: int) -> bool:
        """Whether the host may wait for the device after this step, to look at it or to write a line of the trace."""
        return _due(step, self.trace_every)

    def traces(self, step: int) -> bool:
        """Whether this step gets a line of the trace."""
        return self.trace and self.may_wait(step)

    def logs(self, step: int) -> bool:
        """Whether this step is logged, with a trace or without."""
        return self.log != NONE and self.may_wait(step)

    def measures(self, step: int) -> bool:
        """Whether the equivariance error is measured after this step."""
        return (self.trace or self.log != NONE) and self.error_every > 0 and _due(step, self.error_every)

    @property
    def paced(self) -> bool:
        """Whether gamma moves by itself, with the run's budget, rather than by the script's optimizer."""
        return self.loop == "paced" or self.mode == "scheduled"

    @property
    def lands(self) -> bool:
        """Whether gamma is to be 0 for good at last."""
        return self.mode in ("strict", "scheduled")

    @property
    def deploys_branches(self) -> bool:
        """Whether the branches are part of the model that training is for."""
        return self.mode in ("bounded", "resilient")

    @property
    def bounds_branches(self) -> bool:
        """Whether branches are divided by their spectral norm. Those that stay have to be for gamma to say anything;
        the paper's loop does what is printed."""
        if self.spectral_norm != "auto":
            return bool(self.spectral_norm)
        return self.deploys_branches and self.loop == "paced"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What these settings cost, where people may not expect it."""
        if self.deploys_branches and not self.bounds_branches:
            return (f"mode {self.mode!r} without spectral_norm: {UNBOUNDED}; set spectral_norm = true",)
        return ()

    @property
    def turns(self) -> bool:
        """Whether training forwards see their batch in random frames. On data that break the symmetry that would train
        the break away, so resilient mode has to ask for it."""
        if self.frames != "auto":
            return self.frames == "on"
        return self.paced and self.mode in ("strict", "scheduled")

    @property
    def gamma_start(self) -> float:
        """Where every gamma starts.

        A branch that has learned nothing yet is not to drown what the layer has to learn meanwhile: it starts small.
        A schedule starts at 0.
        """
        if self.mode == "scheduled":
            return 0.0
        if self.gamma_init != "auto":
            return float(self.gamma_init)
        return 0.1 if self.loop == "paced" else 1.0

    @property
    def share(self) -> float:
        """The share of the budget by which gamma arrives."""
        return 0.25 if self.horizon == "auto" else float(self.horizon)

    def latest(self, epoch_steps: int | None) -> float:
        """Steps by which gamma arrives at the latest. Models that see their data so often begin to learn it by heart,
        with branches all the more, and what is to be deployed must be there before that. Where an epoch is a few
        steps, its number says little."""
        if self.horizon != "auto" or self.mode != "strict" or epoch_steps is None:
            return math.inf
        return max(100 * epoch_steps, 1000)

    @property
    def gamma_unit(self) -> float:
        """What counts as a whole gamma in strict mode: the way that it has to go."""
        return (abs(self.gamma_start) or 1.0) if self.mode == "strict" and self.loop == "paced" else 1.0

    def price(self, gradient: Any) -> Any:
        """rho beside the size of the loss's gradient at gamma (a float or a tensor)."""
        value, relative = PRICE.split(self.rho)
        return value * gradient if relative else value

    def dual_rate(self, primal: Any) -> Any:
        """The dual learning rate beside a live primal one (a float or a tensor)."""
        value, relative = RATE.split(self.dual_lr)
        return value * primal if relative else value

    @property
    def branches_in_eval(self) -> bool:
        """Whether ``model.eval()`` keeps the branches, or is f_eq."""
        return self.deploys_branches if self.eval_branches == "auto" else self.eval_branches == "on"


def _due(step: int, every: int) -> bool:
    return step == 1 or step % every == 0


SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
PAPER_ONLY = frozenset(name for name, field in SETTINGS.items() if field.metadata["paper_only"])
"""Settings that only the paper's loop has."""
KINDS: dict[str, Kind] = {name: field.metadata["kind"] for name, field in SETTINGS.items()}


def preset(settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """The preset that these settings start from, and what it sets."""
    name = settings.get("preset")
    if name is None:
        name = FIT
    if name == NONE:
        return NONE, {}
    if name == SHORT and SHORT not in presets:
        warnings.warn(f"preset {SHORT!r} is gone; {FIT!r} is used, which fits the run", AceWarning, stacklevel=3)
        name = FIT
    if name == FIT:
        return FIT, {"loop": "paced", **presets.get(FIT, {})}
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(problems=[("preset", one_of("preset", name, sorted({*presets, FIT, NONE})))])
    return name, presets[name]


def build(settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """The config of a preset and of what the user set, which overrides it."""
    _, base = preset(settings, presets or {})
    given = {key: value for key, value in settings.items() if key != "preset"}
    unknown = [key for key in given if key not in SETTINGS]
    if unknown:
        raise ConfigError(problems=[(key, one_of("setting", key, [*SETTINGS, "preset"])) for key in unknown])
    config = Config(**{**base, **given})
    misplaced = [key for key in given if key in PAPER_ONLY] if config.paced else []
    if misplaced:
        told = "belongs to the paper's loop, and " + (
            "mode is 'scheduled': leave it out"
            if config.mode == "scheduled"
            else "loop is 'paced': leave it out, or set preset 'paper' or loop 'paper'"
        )
        raise ConfigError(problems=[(key, f"{key} {told}") for key in misplaced])
    return config
