"""Elastic restart: torchrun starts all processes again when one of them dies, and they go on from a checkpoint.

The control is the same training of the model without ACE, in the same processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy import ADAPTERS, Layered

from ace_plugins import attach
from ace_plugins.plugins.registry import registry

STEPS, SAVED, DEATH = 60, 20, 45
"""The second process dies in step 45; the checkpoint it goes on from is of step 40."""
RUNS: dict[str, dict[str, Any] | None] = {
    "control": None,
    "strict": {"mode": "strict", "budget": STEPS, "frames": "on"},
    "resilient": {"mode": "resilient", "budget": STEPS},
    "paper": {"loop": "paper", "mode": "resilient", "dual_lr": 0.01},
}


def made(run: str) -> nn.Module:
    torch.manual_seed(0)
    config = RUNS[run]
    return Layered().double() if config is None else attach(Layered().double(), "layered", trace=False, **config)


class Training:
    """One run in one process, which goes on from its checkpoint if there is one."""

    def __init__(self, run: str, folder: Path, rank: int) -> None:
        self.rank, self.saved, self.end = rank, folder / f"{run}.pt", folder / f"{run}-end-{rank}.pt"
        self.model = made(run)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.first = 0
        if self.saved.exists():  # both processes load it, as torch's own examples have it
            self.first, state, moments = torch.load(self.saved)
            self.model.load_state_dict(state)
            self.optimizer.load_state_dict(moments)
        self.wrapped = DistributedDataParallel(self.model)

    def step(self, number: int, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.wrapped(batch[self.rank :: 2]) - 1).square().mean().backward()
        self.optimizer.step()
        if (number + 1) % SAVED == 0 and self.rank == 0:
            torch.save((number + 1, self.model.state_dict(), self.optimizer.state_dict()), self.saved)


def main(folder: Path) -> None:
    """What torchrun runs, in each process."""
    torch.set_num_threads(1)
    for name, adapter in ADAPTERS.items():
        registry().add(adapter(), name)
    torch.distributed.init_process_group("gloo")
    rank, died = torch.distributed.get_rank(), folder / "died"
    again = died.exists()
    batches = torch.randn(STEPS, 16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    runs = [Training(run, folder, rank) for run in RUNS]
    assert {run.first for run in runs} == {40 if again else 0}
    for number in range(runs[0].first, STEPS):
        if number == DEATH and rank == 1 and not again and folder.name == "dying":
            died.touch()
            os._exit(1)
        for run in runs:
            run.step(number, batches[number])
    for run in runs:
        torch.save(run.model.state_dict(), run.end)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process on its way out


def torchrun(folder: Path) -> dict[str, list[dict[str, torch.Tensor]]]:
    folder.mkdir()
    here = Path(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # More restarts than deaths: a port that was free may be taken by the time it is opened.
    command += ["--max-restarts=3", "--monitor-interval=0.1", str(here), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(here.parents[1]), "ACE_QUIET": "1", "OMP_NUM_THREADS": "1"}
    # torchrun's own store outlives a restart, so a fast process may read where the dead one had listened.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {run: [torch.load(folder / f"{run}-end-{rank}.pt") for rank in range(2)] for run in RUNS}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_processes_that_die_and_start_again_end_as_if_they_had_not(tmp_path: Path) -> None:
    undisturbed, restarted = torchrun(tmp_path / "undisturbed"), torchrun(tmp_path / "dying")
    assert (tmp_path / "dying" / "died").exists(), "a process has died"
    for run in RUNS:
        one, two = restarted[run]
        for name, expected in undisturbed[run][0].items():
            assert torch.equal(one[name], two[name]), f"{run}: {name} differs between the processes"
            assert torch.equal(one[name], expected), f"{run}: {name} differs from the run without a death"
    assert not torch.equal(restarted["resilient"][0]["ace.gamma"], torch.full((3,), 0.1)), "gamma has moved"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
