"""The pages of the manual: their code runs, their commands exist, and they are complete."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from manual import blocks, needs

from ace_plugins.cli.main import COMMANDS, cli
from ace_plugins.plugins.registry import registry
from ace_plugins.report.verdicts import BREAKS, DIVERGED, FITS, KEPT, LANDED, MOVING, UNDECIDED, UNUSED
from ace_plugins.settings.config import SETTINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """Return the Python blocks of a page; none if test_followed.py runs the page."""
    return [block.text for block in blocks(page) if block.kind == "python"] if needs(page) is None else []


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def loaded(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [page for page in PAGES if code(page)], ids=name_of)
def test_the_code_of_a_page_runs_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch_geometric")
    pytest.importorskip("ace_schnet")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(code(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def commands(page: Path) -> list[str]:
    """Return the lines of a page that call ``ace-patch``, with continuation lines joined."""
    joined = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4}(?:pip install \S+ && )?(ace-patch .*)$", joined, re.MULTILINE)
    return [*lines, *re.findall(r"`(ace-patch [^`]*)`", joined)]


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in commands(page) if page.name != "commands.md"],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_command_that_is_printed_exists_with_its_options(page: Path, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    if not words or words[0].isupper():
        return
    before = words[: words.index("--")] if "--" in words else words
    context = click.Context(cli, info_name="ace-patch")
    if words[0] in registry().plugins or words[0] in COMMANDS:
        command = cli.get_command(context, words[0])
    else:
        pytest.fail(f"{name_of(page)}: no command {words[0]!r}")
    if isinstance(command, click.Group) and len(before) > 1 and not before[1].startswith("-"):
        command = command.get_command(click.Context(command), before[1])
    assert command is not None, line
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in before[1:] if word.startswith("-")}
    assert given <= known | {"--help"}, line


def test_the_reference_is_up_to_date() -> None:
    written = loaded("write_reference")
    assert text("settings.md") == written.settings_page(), "run python docs/write_reference.py"
    assert text("commands.md") == written.commands_page(), "run python docs/write_reference.py"


def test_the_table_of_results_is_what_the_files_say() -> None:
    page = text("evidence.md")
    assert loaded("write_evidence").page(page) == page, "run python docs/write_evidence.py"
    assert "| SchNet, QM9 alpha, 3,000 molecules, field 1 | broken |" in page


def test_the_table_of_frames_is_what_the_files_say() -> None:
    written, page = loaded("write_evidence"), text("how_to/symmetry_left.md")
    for molecules in (500, 3000):
        file = DOCS / "evidence" / "frames" / f"schnet_{molecules}.json"
        plain, framed = (written.ratios(json.loads(file.read_text()), run) for run in ("resilient", "resilient-z"))
        ratios = [one / other for one, other in zip(framed, plain, strict=True)]
        means = [written.mean(plain), written.mean(framed), written.mean(ratios) + written.interval(ratios)]
        row = [f"{molecules:,}", *means, ", ".join(f"{ratio:.2f}" for ratio in ratios)]
        assert f"| {' | '.join(row)} |" in page


def test_the_picture_of_the_results_shows_what_the_files_say() -> None:
    """The numbers that were drawn are in the picture's metadata, a text chunk of the PNG file."""
    sys.path.insert(0, str(DOCS))
    try:
        drawn = loaded("draw_evidence")
    finally:
        sys.path.remove(str(DOCS))
    data = drawn.PICTURE.read_bytes()
    start = data.index(b"Description\0") + len(b"Description\0")
    shown, _ = json.JSONDecoder().raw_decode(data[start:].decode("latin-1"))
    assert shown == drawn.rows(), "run python docs/draw_evidence.py"
    assert len(shown) >= 8


def test_everything_has_a_place_in_the_manual() -> None:
    settings, commands = text("settings.md"), text("commands.md")
    assert [name for name in SETTINGS if f" {name}\n" not in settings] == []
    assert [name for name in COMMANDS if f"\n## {name}\n" not in commands] == []
    words = (BREAKS, FITS, UNDECIDED, LANDED, MOVING, KEPT, UNUSED, DIVERGED)
    assert [word for word in words if f"| `{word}` |" not in text("how_to/watching.md")] == []


def test_the_page_of_conditions_names_tests_that_exist() -> None:
    page = text("conditions.md")
    for path, part in re.findall(r"`(tests/[\w/.]+)`(?: \(`(\w+)`\))?", page):
        assert (ROOT / path).exists(), path
        assert not part or re.search(rf"def test_\w*{part}", (ROOT / path).read_text(encoding="utf-8")), (
            f"{path} ({part})"
        )


def test_every_page_can_be_found() -> None:
    shown = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name_of(page) for page in PAGES[1:] if f" {page.relative_to(DOCS).as_posix()}\n" not in shown] == []
