"""What ``torchmd-train`` says of itself: how long it trains, its seed, and how it prints its results."""

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

_NUMBER = r"([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))"
# Lightning's table of the test: the name, the border of the cell, the number. y is the energy, neg_dy are the forces,
# and the total is the sum of both by the weights of the loss. Without forces theirs is 0, so the total counts.
METRICS = tuple(
    Metric(name, rf"test_{key}_l1_loss\W*[│\s]\s*{_NUMBER}")
    for name, key in (("test", "total"), ("test forces", "neg_dy"), ("test energy", "y"))
)


def script(argv: Sequence[str]) -> Script | None:
    """None if ``argv`` is of another command."""
    if not argv or not (os.path.basename(argv[0]) == TRAIN or tuple(argv[0].split(os.sep)[-3:]) == MODULE):
        return None
    # In torchmd-train itself a file is read where it stands among the options, and what comes later counts.
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--num-epochs", type=int, action=_Number)
    parser.add_argument("--conf", "-c", action=_File)
    parser.add_argument("--load-model", action=_Beside)
    said = argparse.Namespace(epochs=DEFAULT, source=f"{TRAIN}'s default")
    try:
        parser.parse_known_args(list(argv[1:]), said)
    except argparse.ArgumentError:
        return None  # the script's own to complain about
    return Script(said.epochs, said.source, METRICS, "--seed")


class _Number(argparse.Action):
    def __call__(self, parser: Any, said: argparse.Namespace, value: Any, option: str | None = None) -> None:
        said.epochs, said.source = value, f"{TRAIN} {self.option_strings[0]}"


class _File(argparse.Action):
    """A configuration, if it is there: one that is not is the script's own to complain about."""

    def __call__(self, parser: Any, said: argparse.Namespace, value: Any, option: str | None = None) -> None:
        try:
            with open(value, encoding="utf-8") as file:
                found = re.findall(r"^num_epochs\s*:\s*(\d+)\s*(?:#.*)?$", file.read(), re.MULTILINE)
        except (OSError, UnicodeDecodeError):
            return
        if found:
            said.epochs, said.source = int(found[-1]), str(value)


class _Beside(_File):
    """A checkpoint: what it was trained with is in ``hparams.yaml`` beside it."""

    def __call__(self, parser: Any, said: argparse.Namespace, value: Any, option: str | None = None) -> None:
        super().__call__(parser, said, os.path.join(os.path.dirname(value), "hparams.yaml"), option)
