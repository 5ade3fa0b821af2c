"""Settings drawn at random, each of its kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ace_plugins.settings.config import KINDS
from ace_plugins.settings.kinds import Choice, Flag, Kind, Number

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"dual_optimizer": "adam", "dual_lr": 5e-4, "land_at": 7},
    "short": {"augmented": 5.0},
}


def values(kind: Kind) -> st.SearchStrategy[Any]:
    if isinstance(kind, Choice):
        return st.sampled_from(kind.choices)
    if isinstance(kind, Flag):
        return st.booleans()
    if isinstance(kind, Number) and kind.whole:
        return st.integers(int(kind.low), 10**9)
    if isinstance(kind, Number):
        low, high = (0.0 if kind.positive else max(kind.low, -1e9)), min(kind.high, 1e9)
        return st.floats(low, high, exclude_min=kind.positive, exclude_max=True)
    return st.floats(0, 1e9) | st.floats(0, 1e9).map("{}x".format)


SETTINGS = st.fixed_dictionaries(
    {}, optional={name: values(kind) for name, kind in KINDS.items()} | {"preset": st.sampled_from([*PRESETS, "none"])}
)
