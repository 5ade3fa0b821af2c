"""What training does: every gamma and every branch learns, and the duals move."""

from __future__ import annotations

import math
import warnings

import torch

from ...engine.state import Ace
from ...errors import AceWarning
from ...report.status import status
from ..kit import CheckError, Kit, node_field, outputs_of


def check_every_site_learns(kit: Kit) -> None:
    """The output depends on every gamma."""
    model, example = kit.attached(gamma_init=1.0)
    ace: Ace = model.ace
    with outputs_of(model.train(), ace.sites) as seen:
        kit.loss(model, example).backward()  # type: ignore[no-untyped-call]
    gradients = [0.0] * len(ace.sites) if ace.gamma.grad is None else ace.gamma.grad.tolist()
    silent = [site for site, gradient in zip(ace.sites, gradients, strict=True) if gradient == 0]
    if silent:
        names = ", ".join(repr(site.name) for site in silent)
        called = silent[0].name in seen
        raise CheckError(
            f"gamma of {names} gets no gradient: "
            + ("its branch has no effect on the output" if called else f"{silent[0].module} is not called"),
            node_field(silent[0], "output" if called else "module"),
        )
    odd = [site.name for site, gradient in zip(ace.sites, gradients, strict=True) if gradient != gradient]
    if odd:
        raise CheckError(f"gamma of {odd[0]!r} gets a gradient that is not a number", f"ace_branch, site {odd[0]!r}")


def check_every_branch_learns(kit: Kit) -> None:
    """Every parameter of every branch gets a gradient."""
    model, example = kit.attached(gamma_init=1.0)
    kit.loss(model.train(), example).backward()  # type: ignore[no-untyped-call]
    for node in model.ace.nodes.values():
        branch = model.ace.branch(node.name)
        lonely = [name for name, p in branch.named_parameters() if p.requires_grad and p.grad is None]
        if lonely:
            raise CheckError(
                f"{', '.join(lonely)} in the branch of {node.name!r} get no gradient", f"ace_branch, site {node.name!r}"
            )


def check_training_moves_the_duals(kit: Kit) -> None:
    """Three optimizer steps are three dual steps, and gamma and lambda of every site move and stay finite."""
    for mode in ("strict", "bounded", "resilient"):
        settings = {"loop": "printed", "dual_lr": 0.01, "gamma_init": 1.0, "spectral_norm": mode != "strict"}
        model, example = kit.attached(mode=mode, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)  # of steps that were left out, which is told below
            kit.train(model.train(), example)
        now = status(model)
        if now.steps != 3:
            raise CheckError(f"{mode}: {now.steps} dual steps after 3 optimizer steps", "ace_example: its model")
        for site in now.sites:
            if site.gamma == 1.0 or site.lambda_ == 0 or not math.isfinite(site.gamma + site.lambda_):
                told = f"{mode}: after 3 steps gamma of {site.name!r} is {site.gamma} and lambda {site.lambda_}"
                if not torch.isfinite(kit.loss(model, example)):
                    raise CheckError(f"{told}: the loss is not finite", f"ace_branch, site {site.name!r}")
                raise CheckError(f"{told}: they did not move", node_field(site.name, "module and output"))
