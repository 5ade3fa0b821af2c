"""Compatibility shims: upstream was written in 2021; some of its dependencies are gone or have to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any, NoReturn

from ace_plugins import AceError
from ace_plugins.adapter import Shim, StandIn, whenever_imported

INSTANCE_NORM = "models/segnn/instance_norm.py"


def _torch_scatter() -> ModuleType:
    # Import this before the stub exists: PyTorch Geometric looks for torch_scatter once, and must not find the stub.
    from torch_geometric.utils import scatter as pyg_scatter

    def scatter(
        src: Any, index: Any, dim: int = -1, out: Any = None, dim_size: int | None = None, reduce: str = "sum"
    ) -> Any:
        if out is not None:
            raise AceError("torch_scatter's stub does not support out=; pip install torch-scatter")
        return pyg_scatter(src, index, dim, dim_size, reduce)

    module = ModuleType("torch_scatter", "Stub of torch_scatter, which is not installed. It only has scatter.")
    vars(module)["scatter"] = scatter
    return module


def _wandb() -> ModuleType:
    """Return a stub of wandb in which every name exists, as a function that raises an error when it is called."""
    module = ModuleType("wandb", "Stub of wandb, which is not installed.")

    def missing(attribute: str) -> Callable[..., NoReturn]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise AceError(f"wandb.{attribute}: wandb is not installed; pip install wandb, or run without --log")

        return refuse

    vars(module).update(run=None, __getattr__=missing)
    return module


def _data() -> Any:
    from torch_geometric.data import Data

    return Data


def _contains_isolated_nodes(self: Any) -> bool:
    return bool(self.has_isolated_nodes())


def _scheduler() -> Any:
    from torch.optim.lr_scheduler import MultiStepLR

    return MultiStepLR


def _accept_verbose(scheduler: Any) -> None:
    init = scheduler.__init__

    def __init__(self: Any, *args: Any, verbose: Any = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    scheduler.__init__ = __init__


def _pools_over_first_dimension() -> bool:
    import torch
    from torch_geometric.nn import global_mean_pool

    try:
        pooled = global_mean_pool(torch.ones(2, 3, 1), torch.zeros(2, dtype=torch.long))
    except (RuntimeError, IndexError):
        return False
    return tuple(pooled.shape) == (1, 3, 1)


def _pool_over_first_dimension() -> None:
    """Replace the pooling functions in upstream's module, and nowhere else."""
    from torch_geometric.utils import scatter

    def pooling(reduce: str) -> Callable[..., Any]:
        def pool(x: Any, batch: Any, size: int | None = None) -> Any:
            return scatter(x, batch, 0, size, reduce)

        return pool

    def replace(module: Any) -> None:
        module.global_mean_pool = pooling("mean")
        module.global_max_pool = pooling("max")

    whenever_imported(replace, file=INSTANCE_NORM)


SHIMS = (
    StandIn(
        "torch_scatter",
        "has to be compiled, and upstream only uses its scatter, which PyTorch Geometric has too",
        _torch_scatter,
    ),
    StandIn("wandb", "upstream imports it even if nothing is logged", _wandb),
    Shim(
        "contains_isolated_nodes",
        "PyTorch Geometric has renamed it to has_isolated_nodes",
        lambda: not hasattr(_data(), "contains_isolated_nodes"),
        lambda: setattr(_data(), "contains_isolated_nodes", _contains_isolated_nodes),
    ),
    Shim(
        "scheduler_verbose",
        "torch's schedulers no longer accept verbose, which upstream's QM9 training passes",
        lambda: "verbose" not in signature(_scheduler().__init__).parameters,
        lambda: _accept_verbose(_scheduler()),
    ),
    Shim(
        "pool_over_nodes",
        "PyTorch Geometric pools over the last dimension but one, upstream's InstanceNorm expects the first",
        lambda: not _pools_over_first_dimension(),
        _pool_over_first_dimension,
    ),
)
