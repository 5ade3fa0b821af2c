"""Write the table of results in docs/evidence.md from the files in docs/evidence/.

    python docs/write_evidence.py
    python docs/write_evidence.py --add NAME FOLDER "TITLE" symmetric|broken
    python docs/write_evidence.py --more NAME FOLDER

The second command first writes docs/evidence/NAME.json from a folder of results of ``ace-patch compare``. The third
adds the runs of a second comparison to this file, if both have the same results without ACE. Each file holds one
comparison: its ``title``, the ``truth`` about the data (symmetric or broken), the ``command``, the ``metric`` in the
table, and the ``results`` of every run and seed. A ``note`` says what the command needs besides a clone, and ``paper``
is the ratio that the paper reports for this task, at its own length of training. Files in a folder below docs/evidence/
belong to other pages.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from ace_plugins.statistics import t_interval

DOCS = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: docs/write_evidence.py writes this table -->", "<!-- end of results -->"
HEAD = """\
| task | data | seeds | auto / upstream (95 %) | by seed | strict | resilient | control | kept by auto | paper |
|---|---|---|---|---|---|---|---|---|---|
"""


def collect(folder: Path, title: str, truth: str) -> dict[str, Any]:
    """Return a comparison in the format of docs/evidence/, read from its folder of results."""
    about = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    results = []
    for file in sorted(folder.glob("*/*/result.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["error"] is None:
            rows = re.findall(r"^│.*│ *(\w+) *│$", (file.parent / "log.txt").read_text(encoding="utf-8"), re.MULTILINE)
            verdicts = {"verdicts": rows} if result["run"] == "auto" else {}
            results.append({"run": result["run"], "seed": result["seed"], "metrics": result["metrics"], **verdicts})
    runs, seeds = ",".join(about["runs"]), ",".join(map(str, about["seeds"]))
    command = f"ace-patch compare {about['adapter']} --runs {runs} --seeds {seeds} -- {shlex.join(about['command'])}"
    metric = about["metrics"][0]
    higher = {"higher_is_better": True} if metric["higher"] else {}
    return {"title": title, "truth": truth, "command": command, "metric": metric["name"], **higher, "results": results}


def extend(comparison: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the results of further runs of the same task. Raises a ValueError if upstream's results differ."""
    metric = comparison["metric"]
    known = {(result["run"], result["seed"]): result["metrics"][metric] for result in comparison["results"]}
    for result in more["results"]:
        before, found = known.get((result["run"], result["seed"])), result["metrics"][metric]
        if before is None:
            comparison["results"].append(result)
        elif result["run"] == "off" and before != found:
            raise ValueError(f"seed {result['seed']}, off: expected {before}, found {found}")
    runs = ",".join(dict.fromkeys(["off", *(result["run"] for result in comparison["results"])]))
    comparison["command"] = re.sub(r"--runs \S+", f"--runs {runs}", comparison["command"])


def read() -> list[dict[str, Any]]:
    """Return all comparisons, those on broken data first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in (DOCS / "evidence").glob("*.json")]
    return sorted(found, key=lambda one: (one["truth"], one["title"]))


def ratios(comparison: dict[str, Any], run: str) -> list[float]:
    """Return the error of a run divided by upstream's, for every seed that both have."""
    errors: dict[str, dict[int, float]] = {}
    for result in comparison["results"]:
        value = result["metrics"][comparison["metric"]]
        error = 1 - value if comparison.get("higher_is_better") else value
        errors.setdefault(result["run"], {})[result["seed"]] = error
    upstream = errors["off"]
    return [error / upstream[seed] for seed, error in sorted(errors.get(run, {}).items()) if seed in upstream]


def mean(values: list[float]) -> str:
    """Return the geometric mean as text; "" if there are no values."""
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}" if values else ""


def interval(values: list[float]) -> str:
    """Return the 95 % interval of the geometric mean as text, in brackets; "" if there are fewer than two values."""
    ends = t_interval([math.log(value) for value in values]) if len(values) > 1 else ()
    return " ({:.2f} to {:.2f})".format(*map(math.exp, ends)) if ends else ""


def kept(comparison: dict[str, Any]) -> str:
    """Return the number of branches that mode auto keeps with each seed, such as "10, 9 of 12"."""
    verdicts = [result["verdicts"] for result in comparison["results"] if "verdicts" in result]
    if not verdicts:
        return ""
    return ", ".join(str(words.count("breaks")) for words in verdicts) + f" of {len(verdicts[0])}"


def table() -> str:
    """Return the table in Markdown."""
    rows = []
    for one in read():
        auto = ratios(one, "auto")
        by_seed = ", ".join(f"{ratio:.2f}" for ratio in auto)
        others = [mean(ratios(one, run)) for run in ("strict", "resilient", "branches")]
        paper = str(one.get("paper", ""))
        row = [
            one["title"],
            one["truth"],
            str(len(auto)),
            mean(auto) + interval(auto),
            by_seed,
            *others,
            kept(one),
            paper,
        ]
        rows.append(f"| {' | '.join(row)} |\n")
    return HEAD + "".join(rows)


def page(text: str) -> str:
    """Return the page with the table in its place."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--add"]:
        name, folder, title, truth = sys.argv[2:]
        text = json.dumps(collect(Path(folder), title, truth), indent=1, ensure_ascii=False)
        (DOCS / "evidence" / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if sys.argv[1:2] == ["--more"]:
        file, folder = DOCS / "evidence" / f"{sys.argv[2]}.json", sys.argv[3]
        comparison = json.loads(file.read_text(encoding="utf-8"))
        extend(comparison, collect(Path(folder), "", ""))
        file.write_text(json.dumps(comparison, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    evidence = DOCS / "evidence.md"
    evidence.write_text(page(evidence.read_text(encoding="utf-8")), encoding="utf-8")
