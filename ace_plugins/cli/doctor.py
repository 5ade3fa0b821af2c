"""``ace-patch doctor``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..testing.doctor import diagnose
from .options import as_json, print_json
from .tables import print_diagnosis


@click.command()
@click.argument("adapter")
@click.argument("checkout", type=click.Path(path_type=Path), required=False)
@as_json
def doctor(adapter: str, checkout: Path | None, as_json: bool) -> None:
    """Attach ADAPTER to a small model: sites, branches, parameters, symmetry at gamma = 0 and 1.

    An upstream that is cloned is looked for in CHECKOUT, or in the current folder.
    """
    found = diagnose(adapter, checkout=checkout)
    if as_json:
        print_json(found.to_dict())
    else:
        print_diagnosis(found)
    if found.problems:
        sys.exit(1)
