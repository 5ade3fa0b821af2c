"""Writes docs/settings.md and docs/commands.md from the code itself."""

from __future__ import annotations

from html import escape
from inspect import cleandoc
from pathlib import Path

import click

from ace_plugins.cli.main import COMMANDS, cli
from ace_plugins.settings.config import KINDS, PAPER_ONLY, SETTINGS, build
from ace_plugins.settings.fields import Choice, Flag
from ace_plugins.settings.sources import option, variable

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "Written by `python docs/write_reference.py` from the code itself; a test checks that it is up to date.\n"
SETTINGS_HEAD = f"""\
# Settings

{WRITTEN}
Settings are given to `attach` and `patched` by name, to `ace-patch` as options (`--budget`), in a patched clone in
`ace.toml`, and over that by environment variables (`ACE_BUDGET`). Defaults are those of preset `fit`, which is used
unless another is named: the loop that fits the run, with what the adapter adds (EGNO: resilient, `rho = "2.5x"`, gamma
starting at 1). `paper` is what the authors ran, exactly as printed; `none` has the defaults of the paper's loop.
`ace-patch doctor ADAPTER` shows an adapter's presets.
"""
PAPER_HEAD = """
## Of the paper's loop alone

With the paced loop these are an error.
"""
COMMANDS_HEAD = f"""\
# Commands

{WRITTEN}
A mistake is answered in one line (a clone of another shape: a line for each difference) and exit code 2, and nothing is
changed by it. TAB completes commands, adapters, options, their values and presets, with
`eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"` in `~/.bashrc` (zsh: the same with `zsh_source`; fish:
`_ACE_PATCH_COMPLETE=fish_source ace-patch | source`).

Options that are settings (`--mode`, `--budget` and so on) are explained in [Settings](settings.md).

| environment variable | |
|---|---|
| `ACE_QUIET=1` | say nothing on stderr |
| `ACE_RUNS` | the folder for the records of runs, instead of `.ace/runs` |
| `ACE_TRACE=0` | no record |
| `ACE_LOAD_PLUGINS` | load only these plugins, by name with commas; empty for none |
"""
CHECKOUT = ("segnn", "Patch a clone of an upstream, here of SEGNN; `egno` and `vn_dgcnn` are the same.")


def settings_page() -> str:
    both = [_setting(name) for name in SETTINGS if name not in PAPER_ONLY]
    paper_only = [_setting(name) for name in SETTINGS if name in PAPER_ONLY]
    return SETTINGS_HEAD + "".join(both) + PAPER_HEAD + "".join(paper_only)


def _setting(name: str) -> str:
    field, kind = SETTINGS[name], KINDS[name]
    if isinstance(kind, Choice):
        values = " ".join(f"`{choice}`" for choice in kind.choices)
    else:
        values = kind.expected
    flag = f"{option(name)}`, `--no-{option(name)[2:]}" if isinstance(kind, Flag) else option(name)
    head = f"\n{'###' if name in PAPER_ONLY else '##'} {name}\n\n{_sentence(field.metadata['help'])}\n\n"
    default = getattr(build({"preset": "none"} if name in PAPER_ONLY else {}), name)
    return head + f"Default `{default}`; {values}. `{flag}`, `{variable(name)}`.\n"


def commands_page() -> str:
    context = click.Context(cli, info_name="ace-patch")
    parts = [COMMANDS_HEAD]
    for name in sorted([CHECKOUT[0], *COMMANDS]):
        command = cli.get_command(context, name)
        if command is not None:
            parts.append(_command(name, command, click.Context(command, info_name=name, parent=context)))
    return "".join(parts)


def _command(name: str, command: click.Command, context: click.Context) -> str:
    usage = " ".join([f"ace-patch {name}", *command.collect_usage_pieces(context)])
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in SETTINGS]
    rows = [record for record in (p.get_help_record(context) for p in options) if record is not None]
    table = "\n| option | |\n|---|---|\n" + "".join(_row(*row) for row in rows) if rows else ""
    return f"\n## {name}\n\n    {usage}\n\n{_prose(command.help or '')}\n{table}"


def _row(option: str, text: str) -> str:
    # As HTML: a bar inside of backticks is the end of a cell for some readers of Markdown.
    told, text = (escape(" ".join(each.split()), quote=False).replace("|", "&#124;") for each in (option, text))
    return f"| <code>{told}</code> | {text} |\n"


def _prose(text: str) -> str:
    """A command's help. Paragraphs that click was told to leave as they are become code."""
    parts = []
    for part in cleandoc(text).split("\n\n"):
        kept = part.startswith("\b")
        lines = part.removeprefix("\b").strip("\n").splitlines()
        parts.append("\n".join(f"    {line.strip()}" if kept else line.strip() for line in lines))
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}.".replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")
    (ROOT / "docs" / "commands.md").write_text(commands_page(), encoding="utf-8")
