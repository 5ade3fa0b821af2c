"""Student's t intervals, for comparisons of runs and for errors under subgroups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided 95 % quantiles of Student's t distribution with 1 to 30 degrees of freedom."""


def t_quantile(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution; above 30 degrees of freedom an approximation."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.372 / freedom + 2.82 / freedom**2


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two independent values, by Student's t distribution."""
    mean, count = statistics.fmean(values), len(values)
    half = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half
