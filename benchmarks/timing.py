"""Two sides timed in turns, so that noise meets both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Timed = Callable[[], None]


def clock() -> float:
    """Seconds: of the processor where one thread works, which others on the machine do not slow, else of the wall."""
    return (
        time.process_time() if torch.get_num_threads() == 1 and not torch.cuda.is_available() else time.perf_counter()
    )


def interleaved(one: Timed, two: Timed, rounds: int) -> float:
    """Time of ``one`` over time of ``two``: the median over rounds, each round both, in turns first."""
    return statistics.median(first / second for first, second in in_turns(one, two, rounds))


def in_turns(one: Timed, two: Timed, rounds: int) -> list[tuple[float, float]]:
    """Seconds of both sides, round by round."""
    found = []
    for number in range(rounds):
        seconds = {}
        for side in (one, two) if number % 2 else (two, one):
            begin = clock()
            side()
            seconds[side] = clock() - begin
        found.append((seconds[one], seconds[two]))
    return found


def trainer(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, optimizer: Any = None) -> Timed:
    """A training step of a model on these arguments; of several outputs the first is what counts."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        output = model(*args, **kwargs or {})
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()

    return step


def evaluator(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Timed:
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(*args, **kwargs or {})

    return run
