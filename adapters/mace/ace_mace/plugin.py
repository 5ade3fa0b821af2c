"""MACE: where ACE goes in, and how E(3) acts on it.

A layer gathers messages and multiplies them with each other: ``products[i](node_feats=..., sc=..., node_attrs=...)``.
Each product is a site. Its branch, the host's MLP, reads the messages [nodes, channels, irreps] and nothing else: never
positions, so that the energy stays invariant under translations, and forces stay its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

from .command import script

if TYPE_CHECKING:
    from torch import nn

NAME = "mace"


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream(
        "MACE (mace-torch)",
        ("mace.modules.models:MACE",),
        # MACE never calls model.eval(). Without a graph behind the forces there is nothing to train on.
        evaluating={"training": False, "compute_force": True},
    )


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    sites = []
    for number, product in enumerate(model.products):
        _check_layout(product, model)
        path = f"products.{number}"
        irreps_in, irreps_out = product.symmetric_contractions.irreps_in, product.linear.irreps_out
        channels = irreps_in[0].mul
        one = "+".join(str(irrep.ir) for irrep in irreps_in)
        acts = ace.Irreps(one), ace.Irreps(irreps_out)
        shape = (channels, irreps_in.dim // channels)
        sites.append(ace.Site(path, path, shape, (irreps_out.dim,), reads=ace.Tap("node_feats"), acts=acts))
    return sites


def _check_layout(product: Any, model: nn.Module) -> None:
    for name, option in (("cueq_config", "--enable_cueq"), ("oeq_config", "--enable_oeq")):
        kernels = getattr(product, name, None) or getattr(model, name, None)
        if kernels is not None and getattr(kernels, "enabled", False):
            raise ace.AdapterError(
                f"{type(model).__name__} is built for accelerated kernels ({name}), which lay features out in another "
                f"way than the branches read them: train without {option}; a model trained in mode strict can be used "
                "with them afterwards"
            )


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    # Rows of the cell are lattice vectors; shifts are sums of them, one for every edge.
    inputs: dict[str, ace.Action] = {
        "data.positions": ace.Positions(),
        "data.cell": ace.Vectors(),
        "data.shifts": ace.Vectors(),
    }
    graphs = ace.Graphs("data.batch", edges={"data.shifts": "data.edge_index"}, several={"data.cell": 3})
    outputs: dict[str, ace.Action] = {
        "energy": ace.Invariant(),
        "node_energy": ace.Invariant(),
        "forces": ace.Vectors(),
        "virials": ace.Tensors(),
        "stress": ace.Tensors(),
        "interaction_energy?": ace.Invariant(),  # of ScaleShiftMACE
    }
    group = ace.SE3 if getattr(model, "use_so3", False) else ace.E3  # features without parity tell left from right
    # Total energies are those of single atoms for the most part, which nothing can break.
    return ace.GroupAction(group, inputs, outputs, graphs, beside=("energy", "node_energy"))


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # mace_run_train learns at a rate of 0.01 unless told otherwise, and its branches grow fast: beside one that starts
    # at a tenth f_eq falls behind, and does not catch up once it is alone. docs/evidence.md has the runs.
    return {"fit": {"gamma_init": 0.01}}


@ace.hookimpl
def ace_script(argv: Sequence[str]) -> ace.Script | None:
    return script(argv)


@ace.hookimpl
def ace_attached(model: Any) -> None:
    if model.ace.adapter == NAME:
        from .finishing import install

        install()


@ace.hookimpl
def ace_example(seed: int, model: nn.Module | None) -> ace.Example:
    from .example import example_for, small_example

    return small_example(seed) if model is None else example_for(model, seed)
