"""Hostile input: whatever comes, the answer is a result or an error in one line, never a traceback from inside.

A few examples of each kind run with all tests; ``tox run -e fuzz`` takes as many as ``ACE_FUZZ`` says.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import ADAPTERS, Layered
from traces import write_run

from ace_plugins import AceError, AceWarning, Config, attach, export
from ace_plugins.adapter import Example, Script, Shim, Site, hookimpl
from ace_plugins.checkout.marking import is_marked, mark, unmark
from ace_plugins.plugins.plugin import EXPECTED
from ace_plugins.plugins.registry import registry
from ace_plugins.report.page import describe_run, render_report
from ace_plugins.report.trace import read_run
from ace_plugins.report.verdicts import judge_saved
from ace_plugins.settings.config import SETTINGS
from ace_plugins.settings.sources import VARIABLES, resolve
from ace_plugins.settings.toml_file import read

EXAMPLES = int(os.environ.get("ACE_FUZZ") or 15)
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not os.environ.get("ACE_FUZZ"),
)

numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none())
words = st.one_of(
    st.text(max_size=20), st.sampled_from(["auto", "1x", "nan", "-1", "600 epochs", "strict", "on", "{}"])
)
nested = st.recursive(
    st.one_of(numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)


def one_line(error: AceError) -> None:
    assert str(error).strip(), "an error says something"
    assert "\n" not in str(error).strip()


def toml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, dict) else "{" + ", ".join(f"a = {toml(v)}" for v in value) + "}"


@fuzzed
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(max_size=300).map(str.encode),
        st.dictionaries(st.sampled_from([*SETTINGS, "adapter", "preset", "mdoe"]), nested, max_size=6).map(
            lambda told: "\n".join(f"{key} = {toml(value)}" for key, value in told.items()).encode()
        ),
    )
)
def test_settings_files(content: bytes) -> None:
    try:
        config = resolve({}, file=read(Path("ace.toml"), content)).config
    except AceError as error:
        one_line(error)
    else:
        assert isinstance(config, Config)


@fuzzed
@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), words, max_size=5))
def test_environments(environment: dict[str, str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)
            config = resolve({}, environment=environment).config
    except AceError as error:
        one_line(error)
    else:
        assert isinstance(config, Config)


SOURCES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(str.encode),
    st.lists(
        st.sampled_from(
            [
                "import os",
                "import ace_plugins.activate",
                '"""',
                "    import ace_plugins.activate  # x",
                "from __future__ import annotations",
                "if True:",
                "    pass",
                "x = 1; import ace_plugins.activate",
                "\\",
                "def f():",
                "#!/usr/bin/python",
                "\t",
                "# -*- coding: latin-1 -*-",
            ]
        ),
        max_size=12,
    ).map(lambda lines: "\n".join(lines).encode()),
)


@fuzzed
@given(SOURCES)
def test_marked_scripts(source: bytes) -> None:
    try:
        plain = unmark(source)
        marked = mark(plain, "main.py")
    except AceError as error:
        one_line(error)
        return
    assert is_marked(marked)
    assert unmark(marked) == plain


def attached() -> dict[str, Any]:
    torch.manual_seed(0)
    return dict(attach(Layered(), trace=False).state_dict())


leaves = st.one_of(
    numbers,
    words,
    st.sampled_from(["empty", "sparse", "meta", "bool", "complex", "quantum"]).map(
        lambda kind: {
            "empty": torch.zeros(0),
            "sparse": torch.eye(2).to_sparse(),
            "meta": torch.zeros(2, device="meta"),
            "bool": torch.ones(2, dtype=torch.bool),
            "complex": torch.ones(2, dtype=torch.complex64),
        }.get(kind, torch.ones(2))
    ),
)
keys = st.one_of(
    st.sampled_from(
        ["ace.gamma", "ace.manifest", "module.ace.manifest", "state", "param_groups", "ema.ema_weight_0", "model", ""]
    ),
    st.integers(0, 3),
    st.text(max_size=5),
)
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=5)),
    max_leaves=10,
)


@fuzzed
@given(structures, st.dictionaries(keys, leaves, max_size=4), st.booleans())
def test_checkpoints(structure: Any, more: dict[Any, Any], beside: bool) -> None:
    state = attached()
    content = {"model": {**state, **more}, "other": structure} if beside else {**state, **more}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)
            plain = export(content)
    except AceError as error:
        one_line(error)
    else:
        assert not any(str(key).startswith("ace.") for key in (plain["model"] if beside else plain))


@fuzzed
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=8), st.integers(0, 1 << 20))
def test_damaged_files(changes: list[tuple[int, int]], cut: int) -> None:
    file = io.BytesIO()
    torch.save(attached(), file)
    content = bytearray(file.getvalue())
    for place, byte in changes:
        content[place % len(content)] = byte
    del content[max(1, len(content) - cut % 400) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                export(path)
        except AceError as error:
            one_line(error)


lines = st.one_of(
    nested.map(json.dumps),
    st.dictionaries(
        st.sampled_from(
            [
                "step",
                "gamma",
                "lambda",
                "u",
                "loss",
                "lr",
                "error",
                "event",
                "finished",
                "gradient",
                "landed",
                "diverged",
                "expected",
                "loaded",
                "test",
                "unused",
            ]
        ),
        nested,
        max_size=8,
    ).map(json.dumps),
    st.text(max_size=40),
)


@fuzzed
@given(st.lists(lines, max_size=8), st.one_of(nested.map(json.dumps), st.text(max_size=40)), st.booleans())
def test_traces(told: list[str], about: str, replace: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_run(Path(name) / "run", lines=4, mode="strict")
        trace = folder / "trace.jsonl"
        trace.write_bytes(trace.read_bytes() + "\n".join(told).encode("utf-8", "surrogatepass"))
        if replace:
            (folder / "run.json").write_bytes(about.encode("utf-8", "surrogatepass"))
        try:
            run = read_run(folder)
            judge_saved(run)
            json.dumps(describe_run(run))
            assert render_report([run]).startswith("<!DOCTYPE html>")
        except AceError as error:
            one_line(error)


shapes = st.lists(st.integers(-1, 9), max_size=3).map(tuple)


def answer_of(kind: Any, *parts: Any) -> Any:
    """What the contract expects, made of odd parts; None where its own check refuses them, inside the hook."""
    try:
        return kind(*parts)
    except ValueError:
        return None


answers = st.one_of(
    nested,
    st.sampled_from([torch.ones(2), Layered, Layered(), print, object(), iter([]), ValueError("x")]),
    st.lists(
        st.builds(
            answer_of,
            st.just(Site),
            st.sampled_from(["a", "", "layers.0"]),
            st.sampled_from(["layers.0", "layers", "head", "nowhere", "layers.0.1"]),
            shapes,
            shapes,
        ),
        max_size=3,
    ),
    st.builds(answer_of, st.just(Script), nested),
    st.builds(answer_of, st.just(Example), nested, nested),
    st.lists(st.builds(answer_of, st.just(Shim), words, words, st.just(bool), st.just(print)), max_size=2),
)


@fuzzed
@given(st.dictionaries(st.sampled_from(sorted(EXPECTED)), answers, min_size=1, max_size=3))
def test_answers_of_plugins(told: dict[str, Any]) -> None:
    """An adapter that answers oddly, as one installed by somebody else may: attached and trained for a step."""

    class Odd(ADAPTERS["layered"]):  # type: ignore[misc]
        pass

    for hook, answer in told.items():
        setattr(Odd, hook, hookimpl(lambda self, answer=answer: answer))
    registry().add(Odd(), "odd")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)
            model = attach(Layered(), "odd", trace=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.ones(4, 3)).mean().backward()
            optimizer.step()
    except AceError as error:
        one_line(error)
    finally:
        registry().remove("odd")
