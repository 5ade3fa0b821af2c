"""MACE's command line: what ``mace_run_train`` says of epochs, and how it prints its results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ace_plugins import adapter as ace

SCRIPTS = ("mace_run_train", "run_train.py")
OPTION = "--max_num_epochs"
DEFAULT = 2048
_NUMBER = r"([-+.\de]+|nan|inf)"
# The tables of errors have a row for each set of structures: | name | energy | force | relative |. Of the sets to test
# on the last counts, and with two stages the second one's.
_ROW = r"^\|\s*(?!train_|valid_|config_type)[^|]+\|"
METRICS = (
    ace.Metric("test force", rf"{_ROW}[^|]*\|\s*{_NUMBER}"),
    ace.Metric("test energy", rf"{_ROW}\s*{_NUMBER}"),
    ace.Metric("validation force", rf"Epoch \d+: .*_F=\s*{_NUMBER}"),
    ace.Metric("validation energy", rf"Epoch \d+: .*_E(?:_per_atom)?=\s*{_NUMBER}"),
)


def script(argv: Sequence[str]) -> ace.Script | None:
    """Options go before the file that ``--config`` names, as upstream has it."""
    found = ace.Script.with_option(argv, SCRIPTS, OPTION, default=DEFAULT, metrics=METRICS, seed="--seed")
    if found is None or found.source.endswith(OPTION):
        return found
    words = list(argv[1:])
    joined = next((word.partition("=")[2] for word in words if word.startswith("--config=")), None)
    path = joined or (words[words.index("--config") + 1] if "--config" in words[:-1] else None)
    if path is None:
        return found
    try:
        with open(path, encoding="utf-8") as file:
            said = re.findall(rf"^\s*{OPTION.lstrip('-')}\s*[:=]\s*(\d+)\s*(?:#.*)?$", file.read(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return found  # the script's own to complain about
    return replace(found, epochs=int(said[-1]), source=path) if said else found
