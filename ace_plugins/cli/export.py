"""``ace-patch export``."""

from __future__ import annotations

import warnings

import click

from ..engine.checkpoints import exported
from ..errors import AceWarning
from .options import as_json, print_json


@click.command()
@click.argument("checkpoint", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Where the checkpoint without ACE goes.")
@as_json
def export(checkpoint: str, output: str, as_json: bool) -> None:
    """Write CHECKPOINT without ACE, so that plain upstream loads it with strict=True."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AceWarning)
        done = exported(checkpoint, output)
    notices = [str(warning.message) for warning in caught if issubclass(warning.category, AceWarning)]
    if as_json:
        told = {"checkpoint": checkpoint, "output": output, "kept": done.kept, "removed": done.removed}
        print_json({**told, "warnings": notices})
        return
    click.echo(f"{output}: {done.kept} tensors kept, {done.removed} of ACE removed")
    for notice in notices:
        click.echo(f"ace-patch: {notice}", err=True)
