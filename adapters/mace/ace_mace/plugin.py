"""Adapter for MACE.

A layer sums messages and multiplies them with each other: ``products[i](node_feats=..., sc=..., node_attrs=...)``. Each
product is a site. Its branch, the default MLP of ace-plugins, reads the messages [nodes, channels, irreps] and never
positions. So the energy stays invariant under translations, and forces stay minus the gradient of the energy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream(
        "MACE (mace-torch)",
        ("mace.modules.models:MACE",),
        # MACE never calls model.eval(). With these arguments forces have no autograd graph, so it is not training.
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
        sites.append(ace.Site(path, path, shape, (irreps_out.dim,), ace.Tap("node_feats"), acts=acts))
    return sites


def _check_layout(product: Any, model: nn.Module) -> None:
    for name, option in (("cueq_config", "--enable_cueq"), ("oeq_config", "--enable_oeq")):
        kernels = getattr(product, name, None) or getattr(model, name, None)
        if kernels is not None and getattr(kernels, "enabled", False):
            raise ace.AdapterError(
                f"{type(model).__name__} is built for accelerated kernels ({name}), which use another feature layout "
                f"than the branches; train without {option}; a model trained in mode strict can use them afterwards"
            )


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    # Rows of the cell are lattice vectors; each edge has a shift, which is a sum of lattice vectors.
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
        "interaction_energy?": ace.Invariant(),  # only ScaleShiftMACE returns it
    }
    # With use_so3 features have no parity, so there is no symmetry under reflections.
    group = ace.SE3 if getattr(model, "use_so3", False) else ace.E3
    # The constant energies of single atoms dominate the energies, so errors are measured on the other outputs.
    return ace.GroupAction(group, inputs, outputs, graphs, beside=("energy", "node_energy"))


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # mace_run_train has a learning rate of 0.01 by default, and the branches learn fast. With gamma = 0.1 at the start
    # f_eq learns too little, and does not catch up once the branches are gone; see docs/evidence.md.
    return {"fit": {"gamma_init": 0.01}}


ace_script = ace.LazyHook("ace_mace.command:script")
ace_example = ace.LazyHook("ace_mace.example:example")


@ace.hookimpl
def ace_attached(model: Any) -> None:
    from .finishing import install

    install(model)
