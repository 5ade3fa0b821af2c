"""gamma and lambda over a run, in memory, for the verdicts at its end."""

from __future__ import annotations

import torch
from torch import Tensor


class History:
    """gamma and lambda over a run in a bounded number of points, kept on their device: recording waits for nothing."""

    def __init__(self, points: int = 256) -> None:
        self.points = points
        self.every = 1
        self._taken: list[tuple[int, Tensor]] = []

    def record(self, step: int, gamma: Tensor, lambda_: Tensor) -> None:
        if step % self.every:
            return
        self._taken.append((step, torch.stack([gamma.detach(), lambda_])))
        if len(self._taken) > self.points:
            self.every *= 2
            # By their steps: a run that goes on from a checkpoint may begin anywhere.
            self._taken = [taken for taken in self._taken if not taken[0] % self.every]

    def __len__(self) -> int:
        return len(self._taken)

    def per_site(self) -> list[tuple[list[float], list[float]]]:
        """Of each site its gammas and its lambdas."""
        if not self._taken:
            return []
        # The model may have been moved to another device on the way.
        gamma, lambda_ = torch.stack([values.cpu() for _, values in self._taken], dim=-1).tolist()
        return list(zip(gamma, lambda_, strict=True))
