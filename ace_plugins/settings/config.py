"""All settings of ACE, with their defaults, accepted values and help texts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import AceDeprecationWarning, ConfigError, one_of
from .fields import BudgetKind, Choice, ChoiceOrAxis, Flag, Kind, Multiple, Number

FIT = "fit"  # name of the default preset: the paced loop in mode auto, with the adapter's own changes
NONE = "none"  # the value of ``preset`` that selects no preset, and of ``log`` that selects no logger
LOGGERS = ("tensorboard", "wandb", "trackio")  # each is also the name of a package, and of the extra that installs it
UNBOUNDED = (  # text of a warning about branches that are deployed without a bound
    "the branches stay in the deployed model and nothing bounds them, so a branch can grow while its gamma shrinks: "
    "gamma and u do not measure the distance from equivariance, and no bound on the equivariance error holds"
)
FORMER_LOOPS = {"printed": "paper", "fitted": "paced"}  # former names of the loops are accepted with a warning
LEVEL = 0.001  # level of the test in mode auto; low, because the same samples judge in every epoch
RATE = Multiple()
PRICE = Multiple(positive=True)
BUDGET = BudgetKind()
COUNT = Number(low=0, whole=True)
SWITCH = Choice(("auto", "on", "off"))


def _setting(default: Any, kind: Kind, text: str, *, paper_only: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "help": text, "paper_only": paper_only})


_paper_setting = partial(_setting, paper_only=True)


@dataclass(frozen=True)
class Config:
    """Settings for training a model with ACE, described in docs/settings.md.

    Every field is also a keyword argument of ``attach`` and ``patched``, and an option of ``ace-patch``.

    Raises:
        ConfigError: If a value is invalid. The error lists every problem.
    """

    mode: str = _setting(
        "strict",
        Choice(("auto", "strict", "bounded", "resilient", "scheduled", "off")),
        "auto: keep the branches that lower the loss on held-out samples, remove the others; strict: gamma reaches 0; "
        "resilient: |gamma| <= u, u is learned; bounded: |gamma| <= epsilon; scheduled: gamma rises and falls on a "
        "schedule, independent of the data; off: plain upstream",
    )
    loop: str = _setting(
        "paper",
        Choice(("paced", "paper")),
        "paced: ACE moves gamma, at a speed that fits the budget; paper: the paper's algorithms, unchanged",
    )
    budget: int | str = _setting(
        "auto", BUDGET, "paced: length of the run in optimizer steps or as '600 epochs'; auto: detected from the script"
    )
    horizon: float | str = _setting(
        "auto",
        Number(positive=True, high=1.0, auto=True),
        "paced: share of the budget after which gamma has its final value and mode auto has decided; auto: 0.75 in "
        "mode auto, 0.25 in other modes (in strict mode at most 100 epochs or 1,000 steps)",
    )
    holdout: float | str = _setting(
        "auto",
        Number(low=0, high=0.9, auto=True),
        "paced: share of the training samples that are held out: they train gamma but not the branches; 0: all samples "
        "train both, as in the paper; auto: 0.5 in mode auto, 0 in other modes",
    )
    frames: str = _setting(
        "auto",
        ChoiceOrAxis(SWITCH.choices, hint="or an axis: x, y, z or three numbers, as in '0, 0.6, 0.8'"),
        "transform batches by random group elements; auto: in strict mode (paced) and scheduled mode; an axis (x, y, z "
        "or three numbers): rotations about it only, for data that are symmetric under these",
    )
    dual_optimizer: str = _paper_setting(
        "sgd",
        Choice(("sgd", "adam"), hint="to damp oscillations set augmented above 0, or loop to 'paced'"),
        "optimizer of lambda: sgd (as in the paper) or adam (as in the authors' runs)",
    )
    dual_lr: float | str = _paper_setting(
        "1x", RATE, "learning rate of lambda: a number, or a multiple (1x) of the rate of gamma's parameter group"
    )
    gamma_init: float | str = _setting(
        "auto", Number(auto=True), "initial gamma of every site; auto: 0.1 in the paced loop or with gamma_lr 0, else 1"
    )
    gamma_lr: float = _paper_setting(1.0, Number(low=0), "learning rate of gamma, as a multiple of its group's")
    gamma_weight_decay: bool = _paper_setting(False, Flag(), "apply the optimizer's weight decay to gamma too")
    rho: float | str = _setting(
        "1x",
        PRICE,
        "resilient, auto: weight of the penalty rho / 2 |u|^2; '1x' is the size of the gradient of the loss at gamma",
    )
    u_init: float = _paper_setting(0.0, Number(low=0), "resilient: initial bound u of every site")
    epsilon: float = _setting(0.1, Number(positive=True), "bounded: the bound on |gamma|")
    augmented: float = _paper_setting(
        0.0, Number(low=0), "weight c of the penalty c v^2 on a constraint's violation v, to damp oscillations"
    )
    adam_beta1: float = _paper_setting(0.9, Number(low=0, high=1), "adam: decay rate of the constraint's mean")
    adam_beta2: float = _paper_setting(0.999, Number(low=0, high=1), "adam: decay rate of the constraint's mean square")
    land_at: int = _paper_setting(0, COUNT, "strict: step after which gamma stays 0; 0: never")
    spectral_norm: bool | str = _setting(
        "auto",
        Flag(auto=True),
        "divide branch weights by their spectral norm; auto: in the paced loop, in modes that can keep branches",
    )
    eval_branches: str = _setting(
        "auto", SWITCH, "use branches in model.eval(); auto: all in mode resilient or bounded, kept ones in mode auto"
    )
    device: str = _setting(
        "auto", Choice(("auto", "cpu")), "cpu: run on the CPU even if upstream requires a GPU; auto: upstream chooses"
    )
    shims: bool = _setting(True, Flag(), "apply compatibility shims for missing dependencies")
    tell: bool = _setting(
        True, Flag(), "print a line when ACE is attached, and a summary at the end; ACE_QUIET=1 hides all messages"
    )
    trace: bool = _setting(True, Flag(), "write gamma, lambda and u to .ace/runs/")
    trace_every: int = _setting(10, Number(low=1, whole=True), "steps between two lines of the trace")
    error_every: int = _setting(
        0, COUNT, "steps between two measurements of the equivariance error (for trace and log); 0: never measure"
    )
    symmetry_left: bool = _setting(
        False,
        Flag(),
        "after the last step of the budget, find the subgroup that the model keeps, such as rotations about one axis, "
        "for the report; takes about 1,000 forward passes on training batches",
    )
    log: str = _setting(
        NONE,
        Choice((NONE, *LOGGERS)),
        "also send gamma, lambda and u to a logger; wandb and trackio use the script's open run if there is one",
    )

    def __post_init__(self) -> None:
        if isinstance(self.loop, str) and self.loop in FORMER_LOOPS:
            text = f"loop {self.loop!r} is now called {FORMER_LOOPS[self.loop]!r}; use the new name"
            warnings.warn(text, AceDeprecationWarning, stacklevel=3)
            object.__setattr__(self, "loop", FORMER_LOOPS[self.loop])
        found = {name: kind.problem(name, getattr(self, name)) for name, kind in KINDS.items()}
        problems = [(name, text) for name, text in found.items() if text]
        if not problems and self.mode == "auto" and (self.loop != "paced" or not self.held_out):
            name, wrong = ("mode", f"loop {self.loop!r}") if self.loop != "paced" else ("holdout", "holdout 0")
            text = f"mode 'auto' needs loop 'paced' and holdout above 0, found {wrong}; set mode to 'strict' or another"
            problems = [(name, text)]
        if problems:
            raise ConfigError(problems=problems)

    @property
    def summary(self) -> str:
        """The mode and its most important setting, for display."""
        paper = f"dual lr {self.dual_lr} ({self.dual_optimizer})"
        return f"mode {self.mode}, " + (f"budget {self.budget}" if self.paced else paper)

    def has_landed(self, steps: int) -> bool:
        """Return whether the setting ``land_at`` has made all sites land after this many steps."""
        return self.mode == "strict" and 0 < self.land_at <= steps

    def may_wait(self, step: int) -> bool:
        """Return whether the process may wait for the GPU in this step: only if the step is traced and logged."""
        return step == 1 or step % self.trace_every == 0

    def measures(self, step: int) -> bool:
        """Return whether the equivariance error is measured after this step."""
        every = self.error_every
        return (self.trace or self.log != NONE) and every > 0 and (step == 1 or step % every == 0)

    def copies(self, step: int) -> bool:
        """Return whether the batch of this step is copied, for measurements after the step or at the end of the run."""
        return self.measures(step) or (self.symmetry_left and self.may_wait(step))

    @property
    def paced(self) -> bool:
        """True if the loop updates gamma; otherwise the script's optimizer does."""
        return self.loop == "paced" or self.mode == "scheduled"

    @property
    def lands(self) -> bool:
        """True if the mode brings gamma to 0 at all sites by the end of the run."""
        return self.mode in ("strict", "scheduled")

    @property
    def may_land(self) -> bool:
        """True if sites can land: in modes that bring gamma to 0, and in mode auto, which decides for each site."""
        return self.lands or self.mode == "auto"

    @property
    def held_out(self) -> float:
        """Share of the training samples that judge gamma."""
        by_default = 0.5 if self.mode == "auto" else 0.0
        return by_default if self.holdout == "auto" else float(self.holdout) * self.paced

    @property
    def deploys_branches(self) -> bool:
        """True if branches can stay in the model after training."""
        return self.mode in ("bounded", "resilient", "auto")

    @property
    def bounds_branches(self) -> bool:
        """True if the linear maps of branches are divided by their spectral norm."""
        by_default = self.deploys_branches and self.loop == "paced"
        return by_default if self.spectral_norm == "auto" else bool(self.spectral_norm)

    @property
    def cautions(self) -> tuple[str, ...]:
        """Warnings about consequences of these settings that users may not expect."""
        if self.deploys_branches and not self.bounds_branches:
            return (f"mode {self.mode!r} without spectral_norm: {UNBOUNDED}; set spectral_norm = true",)
        return ()

    @property
    def turns(self) -> bool:
        """True if training batches are transformed by random frames, which hide breaks of the symmetry."""
        return self.paced and self.lands if self.frames == "auto" else self.frames != "off"

    @property
    def gamma_start(self) -> float:
        """Initial gamma; by default 1 if the script's optimizer updates it, else 0.1 to keep new branches small."""
        if self.mode == "scheduled":
            return 0.0
        if self.gamma_init != "auto":
            return float(self.gamma_init)
        return 0.1 if self.loop == "paced" or not self.gamma_lr else 1.0

    @property
    def share(self) -> float:
        """Fraction of the budget after which gamma reaches its target."""
        by_default = 0.75 if self.mode == "auto" else 0.25
        return by_default if self.horizon == "auto" else float(self.horizon)

    @property
    def gamma_unit(self) -> float:
        """Unit in which gamma is measured: its initial |value| in strict mode of the paced loop, otherwise 1."""
        return (abs(self.gamma_start) or 1.0) if self.mode == "strict" and self.loop == "paced" else 1.0

    def dual_rate(self, primal: Any) -> Any:
        """Return lambda's learning rate, given that of gamma's parameter group (``primal``, a float or a tensor)."""
        return RATE.times(self.dual_lr, primal)

    @property
    def branches_in_eval(self) -> bool:
        """True if ``model.eval()`` uses the branches."""
        return self.deploys_branches if self.eval_branches == "auto" else self.eval_branches == "on"


SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
PAPER_ONLY = frozenset(name for name, field in SETTINGS.items() if field.metadata["paper_only"])
KINDS: dict[str, Kind] = {name: field.metadata["kind"] for name, field in SETTINGS.items()}


def find_preset(settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the preset that these settings select, and the preset's settings."""
    name = settings.get("preset") or FIT
    known = {NONE: {}, **presets, FIT: {"loop": "paced", "mode": "auto", **presets.get(FIT, {})}}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(problems=[("preset", one_of("preset", name, known))])
    base = known[name]
    if name == FIT and base["mode"] == "auto" and settings.get("loop", base["loop"]) in ("paper", "printed"):
        base = {**base, "mode": "strict"}  # the paper's loop has no mode auto
    return name, base


def build(base: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Return a config: the settings of a preset (``base``), overridden by these settings."""
    given = {key: value for key, value in settings.items() if key != "preset"}
    unknown = [key for key in {**base, **given} if key not in SETTINGS]
    if unknown:
        raise ConfigError(problems=[(key, one_of("setting", key, [*SETTINGS, "preset"])) for key in unknown])
    config = Config(**{**base, **given})
    misplaced = [key for key in given if key in PAPER_ONLY] if config.paced else []
    if misplaced:
        found = "mode is 'scheduled'" if config.mode == "scheduled" else "loop is 'paced'"
        text = f"is a setting of the paper's loop, and {found}: leave it out, or set preset 'paper'"
        raise ConfigError(problems=[(key, f"{key} {text}") for key in misplaced])
    return config
