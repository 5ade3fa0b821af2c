"""Where gamma, lambda and u went over a run, in a bounded number of points."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class History:
    """gamma, lambda and u over a run: a bounded number of evenly spaced points, kept on their device, so that recording
    waits for nothing."""

    def __init__(self, points: int = 256) -> None:
        self.points = points
        self.every = 1
        self._taken: list[tuple[int, Tensor]] = []

    def record(self, step: int, snapshot: Tensor) -> None:
        """``snapshot``: gamma, lambda and u of every site, [3, sites]."""
        if step % self.every:
            return
        self._taken.append((step, snapshot))
        if len(self._taken) > self.points:
            self.every *= 2
            # By their steps: a run that goes on from a checkpoint may begin anywhere.
            self._taken = [taken for taken in self._taken if not taken[0] % self.every]

    def __len__(self) -> int:
        return len(self._taken)

    def per_site(self, *, now: Tensor) -> list[tuple[list[float], list[float], list[float]]]:
        """Of each site its gammas, its lambdas and its us, the last ones being those of now."""
        points = [*(snapshot.tolist() for _, snapshot in self._taken), now.tolist()]
        gamma, lambda_, u = ([list(site) for site in zip(*(p[row] for p in points), strict=True)] for row in range(3))
        return list(zip(gamma, lambda_, u, strict=True))
