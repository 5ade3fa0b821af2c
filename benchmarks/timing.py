"""Helpers of the benchmarks: two sides are timed in alternation, so that noise affects both alike."""

from __future__ import annotations

import copy
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ace_plugins import attach, status

Timed = Callable[[], None]
WARM_UP = 5
"""Steps that are not measured: the first ones load kernels and compile TorchScript."""


def clock() -> float:
    """Return seconds: processor time for one CPU thread, which other processes do not affect, else wall time."""
    if torch.get_num_threads() == 1 and not torch.cuda.is_available():
        return time.process_time()
    return time.perf_counter()


def measure_in_turns(
    one: Timed, two: Timed, rounds: int, clock: Callable[[], float] = clock
) -> list[tuple[float, float]]:
    """Return the seconds of both sides in each round. The sides take turns in going first."""
    found = []
    for number in range(rounds):
        seconds = {}
        for side in (one, two) if number % 2 else (two, one):
            begin = clock()
            side()
            seconds[side] = clock() - begin
        found.append((seconds[one], seconds[two]))
    return found


def measure_ratio(one: Timed, two: Timed, rounds: int) -> float:
    """Return the median over rounds of the time of ``one`` divided by the time of ``two``."""
    return statistics.median(first / second for first, second in measure_in_turns(one, two, rounds))


def training_step(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, optimizer: Any = None
) -> Timed:
    """Return a training step of a model on these arguments. The loss uses the first output."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        output = model(*args, **kwargs or {})
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()

    return step


def evaluation(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Timed:
    """Return a forward pass of a model in eval mode on these arguments."""
    model.eval()

    def run() -> None:
        with torch.no_grad():
            model(*args, **kwargs or {})

    return run


def land(model: Any, step: Timed, other: Timed) -> None:
    """Train until every gamma has landed. The other side makes as many steps, since late steps differ in speed."""
    while not status(model).landed:
        step()
        other()


@contextmanager
def _changed_hooks(change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the step hooks of all optimizers, in which the dual loop runs; None removes a hook."""
    home = importlib.import_module("torch.optim.optimizer")
    tables = home._global_optimizer_pre_hooks, home._global_optimizer_post_hooks
    before = [dict(table) for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            table[key] = change(hook)
            if table[key] is None:
                del table[key]
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.clear()
            table.update(old)


def without_dual_loop(step: Timed) -> Timed:
    """Return the step without the dual loop."""

    def run() -> None:
        with _changed_hooks(lambda hook: None):
            step()

    return run


def measure_dual_loop(step: Timed, rounds: int) -> float:
    """Return the share of a training step that the dual loop takes: the median over rounds of processor time."""
    seconds = [0.0]

    def timed(hook: Any) -> Any:
        def run(*args: Any) -> Any:
            begin = time.process_time()
            try:
                return hook(*args)
            finally:
                seconds[-1] += time.process_time() - begin

        return run

    shares = []
    with _changed_hooks(timed):
        for _ in range(rounds + 2):
            seconds.append(0.0)
            begin = time.process_time()
            step()
            shares.append(seconds[-1] / (time.process_time() - begin))
    return statistics.median(shares[2:])


def make_pairs(count: int, atoms: int, cutoff: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random molecules: positions, molecule of each atom, and both ends of all pairs within the cutoff."""
    corners = torch.cartesian_prod(*[torch.arange(3)] * 3)[:atoms]
    positions = 1.3 * corners.repeat(count, 1) + 0.15 * torch.randn(count * atoms, 3)
    graph = torch.arange(count).repeat_interleave(atoms)
    near = (positions[:, None] - positions).norm(dim=-1) < cutoff
    others = ~torch.eye(len(positions), dtype=torch.bool)
    sender, receiver = torch.nonzero((graph[:, None] == graph) & near & others, as_tuple=True)
    return positions, graph, sender, receiver


def print_costs(plain: Any, make_step: Callable[[Any], Timed], rounds: int, **resilient: Any) -> None:
    """Print the cost of training steps with ACE relative to upstream, in three settings and after landing.

    Args:
        plain: Model without ACE.
        make_step: Returns the training step of a model.
        rounds: Measurements per ratio.
        **resilient: More settings for resilient mode.
    """

    def measure(step: Timed, other: Timed) -> float:
        for side in (step, other):
            for _ in range(WARM_UP):
                side()
        return measure_ratio(step, other, rounds)

    def upstream() -> Timed:
        return make_step(copy.deepcopy(plain))

    quiet: dict[str, Any] = {"trace": False, "tell": False}
    print(f"noise, upstream / upstream                             : {measure(upstream(), upstream()):.4f}", flush=True)
    for mode, frames in (("strict", "auto"), ("strict", "off"), ("resilient", "auto")):
        more = resilient if mode == "resilient" else {}
        model: Any = attach(copy.deepcopy(plain), mode=mode, frames=frames, budget=100_000, **quiet, **more)
        name = f"{mode}, frames {frames}"
        found = measure(make_step(model), upstream())
        print(f"training step, ACE / upstream, {name:24}: {found:.4f} (goal: at most 1.15)", flush=True)
    landed: Any = attach(copy.deepcopy(plain), mode="strict", budget=40, **quiet)
    step, other = make_step(landed), upstream()
    land(landed, step, other)
    print(f"training step, landed / upstream                       : {measure(step, other):.4f} (goal: at most 1.02)")
