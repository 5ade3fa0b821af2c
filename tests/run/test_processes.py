"""Models that are sent to other processes: mp.spawn and DistributedDataParallel, over gloo on loopback."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn
from toy import ADAPTERS, Layered, VectorMaps

from ace_plugins import attach, status
from ace_plugins.plugins.registry import registry


def train(model: nn.Module, x: torch.Tensor, steps: int = 6) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def worker(rank: int, port: int, model: Any, x: torch.Tensor, folder: str) -> None:
    torch.set_num_threads(1)
    model = copy.deepcopy(model)  # torch sends parameters as shared memory: on GPUs .to(rank) would part them
    registry().add(ADAPTERS["layered"](), "layered")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACE_RUNS=f"{folder}/runs")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    train(nn.parallel.DistributedDataParallel(model), x[rank::2])
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def landing_worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    registry().add(ADAPTERS["layered"](), "layered")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=1)
    torch.manual_seed(0)
    model = attach(Layered(), land_at=2, trace=False)
    train(nn.parallel.DistributedDataParallel(model), torch.randn(8, 3), steps=5)
    assert status(model).landed
    assert status(model).steps == 5
    assert model.ace.gamma.tolist() == [0, 0, 0]
    torch.distributed.destroy_process_group()


def fitted_worker(rank: int, port: int, model: Any, x: torch.Tensor, folder: str) -> None:
    torch.set_num_threads(1)
    model = copy.deepcopy(model)
    for name, adapter in ADAPTERS.items():
        registry().add(adapter(), name)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACE_TRACE="0")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)  # a different seed per rank, as in many scripts
    train(nn.parallel.DistributedDataParallel(model), x[rank::2], steps=70)
    moving = [p for p in model.ace.parameters() if p.grad is not None and p.grad.any()]
    torch.save([model.state_dict(), status(model).landed, len(moving)], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_landing_under_ddp(tmp_path: Path) -> None:
    """DDP needs every parameter in every backward pass, also those of landed branches."""
    torch.multiprocessing.spawn(landing_worker, args=(free_port(), str(tmp_path)), nprocs=1)


def test_a_model_trained_by_two_processes_is_the_model_trained_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = attach(Layered().double(), mode="resilient", dual_lr=0.05, gamma_lr=3.0)
    x = torch.randn(16, 3, dtype=torch.float64)
    alone = copy.deepcopy(model)
    train(alone, x)
    torch.multiprocessing.spawn(worker, args=(free_port(), model, x, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.allclose(v.double(), one[name].double(), atol=1e-12) for name, v in alone.state_dict().items())
    assert int(one["ace.duals.steps"]) == 6
    assert status(model).steps == 0
    # The parent's own run is in there too; of the two workers only rank 0 writes one.
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_two_processes_rest_land_and_free_together(tmp_path: Path) -> None:
    """In the paced loop, two processes give the gamma, lambda and landing of one process on the joined batch."""
    torch.manual_seed(0)
    model = attach(Layered().double(), preset="fit", loop="paced", budget=100, frames="off", trace=False)
    x = torch.randn(16, 3, dtype=torch.float64)
    alone = copy.deepcopy(model)
    train(alone, x, steps=70)
    torch.multiprocessing.spawn(fitted_worker, args=(free_port(), model, x, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one[1:] == two[1:] == [True, 0], "landed, and nothing of ACE is left for the optimizer"
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    assert all(torch.allclose(v.double(), one[0][name].double(), atol=1e-9) for name, v in alone.state_dict().items())


def test_under_a_schedule_two_processes_agree_on_their_penalties(tmp_path: Path) -> None:
    """Each rank has another part of the batch, so penalties would differ without communication."""
    torch.manual_seed(0)
    model = attach(VectorMaps().double(), mode="scheduled", budget=60, frames="off", trace=False)
    x = torch.randn(16, 3, 4, dtype=torch.float64)
    torch.multiprocessing.spawn(fitted_worker, args=(free_port(), model, x, str(tmp_path)), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one[1:] == two[1:] == [True, 0]
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
