"""SIGTERM and SLURM's requeue signal under Lightning itself, if it is installed (``tox run -e extras``)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from toy_clone import Clone

PACKAGE = next((name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name)), None)
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs Lightning: pip install lightning")

SCRIPT = f"""
import json, os, signal, sys
import torch
import {"lightning.pytorch" if PACKAGE == "lightning" else "pytorch_lightning"} as pl
from models.net import Net

class Task(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, number):
        for signal_name in SIGNALS.get(str(self.global_step), []):
            os.kill(os.getpid(), getattr(signal, signal_name))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

SIGNALS = json.loads(sys.argv[1])
torch.manual_seed(0)
task, data = Task(), torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=8)
trainer = pl.Trainer(
    max_epochs=4, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False,
    callbacks=[pl.callbacks.OnExceptionCheckpoint("saved")], default_root_dir="root",
)
trainer.fit(task, data)
print(trainer.global_step, float(sum(p.double().sum() for p in task.parameters())))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    made = Clone(tmp_path)
    made.write(SCRIPT, marked=False)
    scontrol = made.installed / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    scontrol.chmod(0o755)
    return made


def train(clone: Clone, mode: str, signals: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Train under ``ace-patch run``; if ``mode`` is "plain", without it."""
    words = ("train.py", json.dumps(signals))
    if mode == "plain":
        return clone.python(*words, **environment)
    return clone.run("--mode", mode, "--", *words, **environment)


@pytest.mark.parametrize("mode", ["off", "strict"])
def test_sigterm_saves_lightnings_checkpoint(clone: Clone, mode: str) -> None:
    plain = train(clone, "plain", {"7": ["SIGTERM"]})
    (clone.root / "saved" / "on_exception.ckpt").unlink()
    done = train(clone, mode, {"7": ["SIGTERM"]})
    assert (clone.root / "saved" / "on_exception.ckpt").is_file(), done.stderr
    assert done.returncode == plain.returncode
    assert done.stderr.count("8 of 40 steps, interrupted") == (mode == "strict"), "the summary is printed at exit"


@pytest.mark.parametrize("mode", ["off", "strict", "auto"])
def test_slurm_requeues_a_job_that_goes_on_from_its_checkpoint(clone: Clone, tmp_path: Path, mode: str) -> None:
    """SLURM sends SIGUSR1 and then SIGTERM."""
    slurm = dict.fromkeys(["SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID"], "0")
    slurm |= {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "job"}
    slurm["PATH"] = f"{clone.installed}:/usr/bin:/bin"
    done = train(clone, mode, {"19": ["SIGUSR1"], "20": ["SIGTERM"]}, **slurm)
    assert (clone.root / "root" / "hpc_ckpt_1.ckpt").is_file(), done.stderr
    assert (tmp_path / "scontrol.log").read_text() == "requeue 123\n"
    resumed = train(clone, mode, {}, **slurm)
    assert resumed.stdout.split()[0] == "40", resumed.stderr
    assert "had landed before" not in resumed.stderr
    assert resumed.stderr.count("40 of 40 steps, trace in") == (mode in ("strict", "auto"))
