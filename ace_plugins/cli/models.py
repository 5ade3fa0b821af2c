"""The commands of ``ace-patch`` that work on models: ``audit``, ``doctor`` and ``export``.

They need torch, but only once they are called: the shell asks for their options too.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click

from ..errors import AceError, AceWarning
from ..later import later
from .options import adapters, as_json, print_json
from .tables import print_audit, print_diagnosis


@click.command()
@click.argument("adapter", shell_complete=adapters)
@click.argument("checkout", type=click.Path(path_type=Path), required=False)
@as_json
def doctor(adapter: str, checkout: Path | None, as_json: bool) -> None:
    """Attach ADAPTER to a small model: sites, branches, parameters, symmetry at gamma = 0 and 1, and the checks of the
    test kit.

    An upstream that is cloned is looked for in CHECKOUT, or in the current folder. Its code is imported and runs.
    """
    found = later("ace_plugins.testing.doctor").diagnose(adapter, checkout=checkout)
    if as_json:
        print_json(found.to_dict())
    else:
        print_diagnosis(found)
    if found.problems:
        sys.exit(1)


@click.command()
@click.argument("adapter", shell_complete=adapters)
@click.argument("checkout", type=click.Path(path_type=Path), required=False)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Weights for the example, as torch.save wrote them, or a model.",
)
@click.option(
    "--trust", is_flag=True, help="Read a checkpoint that is a model saved whole, too: code in the file runs."
)
@click.option(
    "--branches",
    type=click.Choice(["on", "off"]),
    help="With or without the branches; by default as the mode deploys the model.",
)
@click.option("--averaged", type=int, metavar="N", help="Also the error of the mean over N random frames.")
@click.option("--all", "every", is_flag=True, help="Every submodule, not only those down to the sites.")
@as_json
def audit(
    adapter: str,
    checkout: Path | None,
    checkpoint: Path | None,
    trust: bool,
    branches: str | None,
    averaged: int | None,
    every: bool,
    as_json: bool,
) -> None:
    """How equivariant ADAPTER's example is, as a whole and by layer.

    An upstream that is cloned is looked for in CHECKOUT, or in the current folder. Your own model, and a function
    with your preprocessing in it, is audited by ace_plugins.audit(model, batch).
    """
    on = None if branches is None else branches == "on"
    audited = later("ace_plugins.testing.audit").audit_example
    wanted = {"checkpoint": checkpoint, "trust": trust, "branches_on": on, "average": averaged}
    found = audited(adapter, checkout=checkout, **wanted)
    if as_json:
        print_json(found.to_dict())
    else:
        print_audit(found, every=every)


@click.command()
@click.argument("checkpoint", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Where the checkpoint without ACE goes.")
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
@click.option("--trust", is_flag=True, help="Read models that were saved whole, too: code in the file runs.")
@as_json
def export(checkpoint: str, output: str, overwrite: bool, trust: bool, as_json: bool) -> None:
    """Write CHECKPOINT without ACE, so that plain upstream loads it with strict=True."""
    if Path(output).exists() and not overwrite:
        raise AceError(f"{output!r} exists already: choose another name, or --overwrite")
    if trust:
        later("ace_plugins.patch.shims").REPAIRS.make_importable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AceWarning)
        done = later("ace_plugins.engine.checkpoint").export_checkpoint(checkpoint, output, trust=trust)
    notices = [str(warning.message) for warning in caught if issubclass(warning.category, AceWarning)]
    if as_json:
        told = {"checkpoint": checkpoint, "output": output, "kept": done.kept, "removed": done.removed}
        print_json({**told, "warnings": notices})
        return
    click.echo(f"{output}: {done.kept} tensors kept, {done.removed} of ACE removed")
    for notice in notices:
        click.echo(f"ace-patch: {notice}", err=True)
