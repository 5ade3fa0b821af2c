"""Settings drawn at random, each of its kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ace_plugins import Config
from ace_plugins.settings.config import KINDS, PAPER_ONLY
from ace_plugins.settings.fields import BudgetKind, Choice, Flag, Kind, Multiple, Number
from ace_plugins.settings.sources import resolve

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"dual_optimizer": "adam", "dual_lr": 5e-4, "land_at": 7},
    "damped": {"augmented": 5.0},
}


def build(settings: dict[str, Any], presets: dict[str, dict[str, Any]] | None = None) -> Config:
    return resolve(presets or {}, arguments=settings).config


def values(kind: Kind) -> st.SearchStrategy[Any]:
    if isinstance(kind, Choice):
        return st.sampled_from(kind.choices)
    if isinstance(kind, Flag):
        return st.booleans()
    if isinstance(kind, Multiple):
        return (some := st.floats(0, 1e9, exclude_min=kind.positive)) | some.map("{}x".format)
    if isinstance(kind, Number) and kind.whole:
        return st.integers(int(kind.low), 10**9)
    if isinstance(kind, Number):
        low, high = (0.0 if kind.positive else max(kind.low, -1e9)), min(kind.high, 1e9)
        numbers = st.floats(low, high, exclude_min=kind.positive, exclude_max=True)
        return numbers | st.just("auto") if kind.auto else numbers
    assert isinstance(kind, BudgetKind)
    return st.just("auto") | st.integers(1, 10**9) | st.integers(1, 10**9).map("{} epochs".format)


EVERY = {name: values(kind) for name, kind in KINDS.items() if name != "loop"}
EVERY["preset"] = st.sampled_from([*PRESETS, "none"])
FITTED = {name: kind for name, kind in EVERY.items() if name not in {*PAPER_ONLY, "preset"}}
FITTED["holdout"] = EVERY["holdout"].filter(lambda share: share != 0)  # mode auto, the default, needs judges
# A schedule is neither loop, and takes the settings of neither. Mode auto is of the paced loop.
LEARNED = values(KINDS["mode"]).filter(lambda mode: mode not in ("scheduled", "auto"))
OF_PAPER_LOOP = st.fixed_dictionaries({"loop": st.just("paper")}, optional={**EVERY, "mode": LEARNED})
SETTINGS = OF_PAPER_LOOP | st.fixed_dictionaries({}, optional=FITTED)
