"""Writes files of runs as training does, for tests of reports."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

from ace_plugins.settings.config import Config


def write_run(
    folder: Path,
    *,
    sites: int = 3,
    lines: int = 60,
    every: int = 10,
    mode: str = "resilient",
    finished: bool = True,
    loss: bool = True,
    errors: int = 10,
    rates: bool = True,
    names: list[str] | None = None,
    noise: float = 0.0,
    **about: Any,
) -> Path:
    """Odd sites settle at a gamma that grows with their number, with slack; even ones go to 0."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    config = Config(mode=mode, loop="paced", rho="2x")
    told = {
        "adapter": "egno",
        "sites": names or [f"layers.{n // 2}.{'xh'[n % 2]}" for n in range(sites)],
        "config": dataclasses.asdict(config),
        "command": ["main.py", "--epochs", "60", "--name", "a b"],
        "started": "2026-11-17T10:59:25+0000",
        **about,
    }
    (folder / "run.json").write_text(json.dumps(told))
    ends = [0.0 if n % 2 == 0 else 0.3 * (n + 1) / sites for n in range(sites)]
    slack = mode == "resilient"
    written = []
    for number in range(lines + 1):
        share = number / lines
        fall = math.exp(-6 * share)
        gamma = [end + (1 - end) * fall * math.cos(3 * share * (n % 3)) for n, end in enumerate(ends)]
        gamma = [value + noise * generator.gauss(0, 1) for value in gamma] if noise else gamma
        line: dict[str, Any] = {
            "step": max(1, number * every),
            "seconds": round(0.05 * number * every, 3),
            "gamma": [0.0 if share > 0.8 and not end else value for value, end in zip(gamma, ends, strict=True)],
            "lambda": [1.8 * (end or 0.001) * (1 - fall) for end in ends],
            "u": [end * (1 - fall) if slack else 0.0 for end in ends],
        }
        if mode == "strict":
            line |= {"landed": [n for n, value in enumerate(line["gamma"]) if not value]}
        if loss:
            line["loss"] = 0.02 + 1.5 * fall * math.exp(generator.gauss(0, 0.25)) + 0.01 * abs(generator.gauss(0, 1))
            line["gradient"] = [(0.1 - 0.5 * end) * fall * generator.gauss(1, 0.3) for end in ends]
        if rates:
            line["lr"] = [5e-4 * (1 + math.cos(math.pi * share)) / 2, 5e-4 * (1 + math.cos(math.pi * share)) / 2]
        if errors and number % max(1, lines // errors) == 0:
            line["error"] = {"absolute": 1.0, "relative": 0.2 * fall + 0.02, "samples": 5, "group": "SE(3)"}
        written.append(line)
    if finished:
        written[-1]["finished"] = True
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    return folder
