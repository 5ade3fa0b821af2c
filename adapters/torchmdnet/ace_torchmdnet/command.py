"""Reads epochs from the command line of ``torchmd-train``, and finds the results it prints."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from ace_plugins.adapter import Metric, Script

TRAIN = "torchmd-train"
MODULE = ("torchmdnet", "scripts", "train.py")
DEFAULT = 300
# A row of Lightning's table of test results has the name, the border of the cell and the number. y is the error of the
# energy, neg_dy that of the forces (0 without forces), and total is their sum, weighted as in the loss.
METRICS = tuple(
    Metric(name, f"test_{key}_l1_loss" + r"\W*[│\s]\s*{number}")
    for name, key in (("test", "total"), ("test forces", "neg_dy"), ("test energy", "y"))
)


def script(argv: Sequence[str]) -> Script | None:
    """Return epochs, metrics and seed of torchmd-train; None for another command."""
    if not argv or not (os.path.basename(argv[0]) == TRAIN or tuple(argv[0].split(os.sep)[-3:]) == MODULE):
        return None
    # torchmd-train reads configuration files and options in the given order, and later values override earlier ones.
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--num-epochs", type=int, action=_Number)
    parser.add_argument("--conf", "-c", action=_File)
    parser.add_argument("--load-model", action=_Checkpoint)
    values = argparse.Namespace(epochs=DEFAULT, source=f"{TRAIN}'s default")
    try:
        parser.parse_known_args(list(argv[1:]), values)
    except argparse.ArgumentError:
        return None  # the script reports the error itself
    return Script(values.epochs, values.source, METRICS, "--seed")


class _Number(argparse.Action):
    """The option --num-epochs."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        namespace.epochs, namespace.source = value, f"{TRAIN} {self.option_strings[0]}"


class _File(argparse.Action):
    """The option with a configuration file. A missing file is ignored here: the script itself reports it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        try:
            with open(value, encoding="utf-8") as file:
                found = re.findall(r"^num_epochs\s*:\s*(\d+)\s*(?:#.*)?$", file.read(), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            return
        if found:
            namespace.epochs, namespace.source = int(found[-1]), str(value)


class _Checkpoint(_File):
    """The option with a checkpoint. The configuration of its training is in ``hparams.yaml`` in the same folder."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        super().__call__(parser, namespace, os.path.join(os.path.dirname(value), "hparams.yaml"), option)
