"""The runner against the interpreter itself: the same words, output, errors and exit codes compared."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ace_plugins.run import runner
from ace_plugins.errors import AceError

ROOT = str(Path(runner.__file__).resolve().parents[2])
LAUNCH = "import sys; from ace_plugins.run.runner import run_script; sys.exit(run_script(sys.argv[1:]))"
COMMAND = ("-c", LAUNCH)
MODULE = ("-m", "launch_it")
CONSOLE = (os.path.join("bin", "ace-launch"),)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a launcher beside whatever the test writes into ``src``."""
    folder = tmp_path.resolve() / "src"
    folder.mkdir()
    (folder.parent / "launchers").mkdir()
    (folder.parent / "launchers" / "launch_it.py").write_text(LAUNCH)
    (folder / "bin").mkdir()
    (folder / "bin" / "ace-launch").write_text(LAUNCH)
    return folder


def start(
    here: Path, *words: str, flags: tuple[str, ...] = (), stdout: int = subprocess.PIPE, **environ: str
) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV_"))}
    env["PYTHONPATH"] = os.pathsep.join([ROOT, str(here.parent / "launchers")])
    return subprocess.Popen(
        [sys.executable, "-B", *flags, *words],
        cwd=here,
        env=env | environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="surrogateescape",
    )


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    with process:
        out, err = process.communicate(timeout=60)
    # Addresses differ from one run to the next.
    return Outcome(process.returncode, *(re.sub(r"0x[0-9a-f]+", "0x", text or "") for text in (out, err)))


def python(here: Path, *words: str) -> Outcome:
    return outcome_of(start(here, *words))


def same(
    here: Path,
    *words: str,
    by: Sequence[tuple[str, ...]] = (COMMAND,),
    flags: tuple[str, ...] = (),
    stdout: int = subprocess.PIPE,
    **environ: str,
) -> Outcome:
    """What plain python makes of the words, after every launcher was seen to make the same of them."""
    runs = [start(here, *how, *words, flags=flags, stdout=stdout, **environ) for how in ((), *by)]
    plain, *launched = map(outcome_of, runs)
    assert launched == [plain] * len(by)
    return plain


SHOW = """\
'''The doc.'''
import sys, builtins, __main__
print(sys.argv, sys.path, __name__, __file__, __package__, __spec__ and __spec__.name, __cached__, __doc__)
print(__main__ is sys.modules['__main__'], vars(__main__) is globals(), __builtins__ is builtins)
print(type(__loader__), getattr(__loader__, 'path', None), getattr(__loader__, 'name', None))
print(list(globals()), globals().get('__annotations__'))
"""


@pytest.mark.parametrize(
    "path",
    [
        "show.py",
        "./show.py",
        "bin/../show.py",
        "bin/link.py",
        "-m show",
        "-m pack",
        "-m pack.inner",
        "folder",
        "app.pyz",
    ],
)
def test_what_the_program_sees_of_itself(here: Path, path: str) -> None:
    (here / "show.py").write_text(SHOW)
    (here / "bin" / "link.py").symlink_to(here / "show.py")
    for name in ("pack", "folder"):
        (here / name).mkdir()
        (here / name / "__main__.py").write_text(SHOW)
    (here / "pack" / "__init__.py").write_text("import sys; print(sys.argv)")
    (here / "pack" / "inner.py").write_text(SHOW)
    with zipfile.ZipFile(here / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    outcome = same(here, *path.split(), "a", "--b=c d", by=[COMMAND, MODULE, CONSOLE])
    assert outcome.code == 0
    assert "'--b=c d'" in outcome.out


@pytest.mark.parametrize("path", ["{}/show.py", ".", "folder/", "-c"])
def test_other_ways_to_name_the_program(here: Path, path: str) -> None:
    (here / "show.py").write_text(SHOW)
    (here / "folder").mkdir()
    (here / "__main__.py").write_text(SHOW)
    (here / "folder" / "__main__.py").write_text(SHOW)
    words = ["-c", "import sys; print(sys.argv, sys.path, list(globals()), __loader__, __spec__)"]
    assert same(here, *(words if path == "-c" else [path.format(here)]), "a").out


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        ("show.py", ("-P",)),
        ("show.py", ("-I",)),
        ("show.py", ()),  # PYTHONSAFEPATH
        ("-m json.tool", ("-P",)),
        ("-c import sys;print(sys.path)", ("-P",)),
        ("folder", ("-P",)),
    ],
)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the option came with Python 3.11")
def test_a_safe_path_stays_as_it_is(here: Path, path: str, flags: tuple[str, ...]) -> None:
    (here / "show.py").write_text(SHOW)
    (here / "folder").mkdir()
    (here / "folder" / "__main__.py").write_text(SHOW)
    words = path.split(maxsplit=1) + (["-h"] if "json" in path else [])
    # -I takes no PYTHONPATH, so the launcher finds the package by itself and leaves no trace of it.
    find = f"import sys; sys.path.append({ROOT!r}); from ace_plugins.run.runner import run_script; sys.path.pop(); "
    by = ("-c", find + "sys.exit(run_script(sys.argv[1:]))")
    outcome = same(here, *words, by=[by], flags=flags, **({} if flags else {"PYTHONSAFEPATH": "1"}))
    assert outcome.code == 0
    assert outcome.out


# Each is a whole script; what it writes and how it ends must not differ.
SCRIPTS = {
    "quiet": "",
    "output": "import sys; print('out'); print('err', file=sys.stderr); sys.stdout.write('no newline')",
    "exit-code": "import sys; sys.exit(3)",
    "exit-none": "import sys; sys.exit(None)",
    "exit-text": "raise SystemExit('text')",
    "exit-object": "raise SystemExit(['a', 1])",
    "exit-large": "raise SystemExit(256 + 7)",
    "exit-in-except": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise SystemExit('over')",
    "exit-builtin": "exit(4)",
    "os-exit": "import os; print('lost?'); os._exit(5)",
    "uncaught": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n",
    "cause": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('bad') from e",
    "context": "def f():\n    try:\n        1 / 0\n    except ZeroDivisionError:\n        int('x')\nf()",
    "suppressed": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('bad') from None",
    "str-fails": "class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E",
    "no-exception": "raise 'text'",
    "base-exception": "class Stop(BaseException): pass\nraise Stop('here')",
    "generator-exit": "raise GeneratorExit",
    "os-error": "open('nowhere')",
    "pipe-error": "raise BrokenPipeError(32, 'Broken pipe')",
    "import-error": "import no_such_module_anywhere",
    "multi-line": "x = [\n    1,\n    2 /\n    0,\n]",
    "unicode-error-text": "raise ValueError('\\ud800 \\xe9')",
    "ace-error": "from ace_plugins.errors import AceError\nraise AceError('mine')",
    "syntax-error": "print('never')\nx = = 1\n",
    "indentation-error": "if True:\nx = 1\n",
    "unclosed": "x = (1,\n",
    "exec-syntax-error": "exec('x = = 1')",
    "syntax-warning": "x = 1\nprint(x is 1)\n",
    "deprecation-warning": "import warnings\nwarnings.warn('old', DeprecationWarning)",
    "hook": "import sys, traceback\n"
    "def hook(t, v, tb):\n    print(t, v, traceback.format_tb(tb), v.__traceback__ is tb)\n"
    "    print(sys.exc_info(), v is sys.last_value, tb is sys.last_traceback)\n"
    "sys.excepthook = hook\n1 / 0",
    "hook-fails": "import sys\ndef hook(*a):\n    {}[0]\nsys.excepthook = hook\n1 / 0",
    "hook-exits": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0",
    "hook-missing": "import sys\ndel sys.excepthook\n1 / 0",
    "hook-syntax-error": "import sys\nsys.excepthook = lambda *a: print(a)\ncompile('x = = 1', 'a', 'exec')",
    "interrupt": "import atexit; atexit.register(print, 'bye')\nprint('go')\nraise KeyboardInterrupt",
    "interrupt-signal": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "interrupt-subclass": "class K(KeyboardInterrupt): pass\nraise K",
    "interrupt-hook": "import sys\nsys.excepthook = lambda t, v, tb: print(t, tb.tb_next)\nraise KeyboardInterrupt",
    "interrupt-caught": "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    print('caught')",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "atexit": "import atexit\natexit.register(lambda: print('bye', __name__))\nprint('end')",
    "atexit-after-error": "import atexit\natexit.register(print, 'bye')\n1 / 0",
    "atexit-fails": "import atexit\natexit.register(lambda: 1 / 0)",
    "thread": "import threading, time\ndef f():\n    time.sleep(.1); import __main__; print(__main__.x)\n"
    "threading.Thread(target=f).start()\nx = 'late'\nprint('end')",
    "thread-after-error": "import threading, time\ndef f():\n    time.sleep(.1); print('late')\n"
    "threading.Thread(target=f).start()\n1 / 0",
    "thread-fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
    "finalizer": "class D:\n    def __del__(self): print('gone')\nd = D()",
    "finalizer-after-error": "class D:\n    def __del__(self): print('gone')\nd = D()\n1 / 0",
    "pickle": "import pickle\nclass A:\n    x = 1\nprint(pickle.loads(pickle.dumps(A())).x, A.__module__, A)",
    "dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\nimport typing\n"
    "@dataclass\nclass A:\n    x: int = 1\nprint(A(), typing.get_type_hints(A))",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "future": "from __future__ import annotations\nx: undefined = 1\nprint(__annotations__)",
    "no-future": "def f(x: int): pass\nprint(f.__annotations__)\ny: undefined = 1",
    "future-of-exec": "exec('def f(x: int): pass'); print(f.__annotations__)",
    "doc": "'''Doc of it.'''\nprint(__doc__)",
    "source": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getfile(f))",
    "shebang": "#!/usr/bin/env python\nprint('ran')",
    "warning-filter": "import sys, warnings\nprint(len(warnings.filters), sys.flags)",
    "sibling": "import sibling\nprint(sibling.__file__, sibling.main is __import__('__main__'))",
    "fork": "import os\nif os.fork() == 0:\n    raise SystemExit(3)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
}
if sys.version_info >= (3, 11):
    SCRIPTS["group"] = "try:\n    1 / 0\nexcept Exception as e:\n    raise ExceptionGroup('two', [e, ValueError(1)])"
    SCRIPTS["note"] = "e = ValueError(1)\ne.add_note('more')\nraise e"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_under_python(here: Path, name: str) -> None:
    (here / "sibling.py").write_text("import __main__ as main")
    (here / "it.py").write_text(SCRIPTS[name])
    same(here, "it.py")


@pytest.mark.parametrize("name", ["uncaught", "cause", "exit-code", "interrupt", "thread", "syntax-error", "finalizer"])
def test_whatever_launches_it(here: Path, name: str) -> None:
    (here / "it.py").write_text(SCRIPTS[name])
    same(here, "it.py", by=[MODULE, CONSOLE])


def test_the_table_ends_in_every_way(here: Path) -> None:
    codes = {
        "quiet": 0,
        "exit-code": 3,
        "exit-text": 1,
        "os-exit": 5,
        "uncaught": 1,
        "hook-exits": 9,
        "killed": -15,
    }
    for name, code in (codes | {"interrupt": -2, "interrupt-subclass": 1}).items():
        (here / "it.py").write_text(SCRIPTS[name])
        assert python(here, *COMMAND, "it.py").code == code, name


@pytest.mark.parametrize("name", ["uncaught", "context", "syntax-error", "interrupt", "atexit"])
@pytest.mark.parametrize("words", [("-m", "it"), ("folder",), ("-c",)], ids=["module", "folder", "code"])
def test_other_programs_end_as_under_python(here: Path, words: tuple[str, ...], name: str) -> None:
    (here / "folder").mkdir()
    (here / "folder" / "__main__.py").write_text(SCRIPTS[name])
    (here / "it.py").write_text(SCRIPTS[name])
    same(here, *words, *([SCRIPTS[name]] if words == ("-c",) else []))


@pytest.mark.parametrize("module", ["no_such", "no_such.inner", "json", "it.py", "broken"])
def test_a_module_that_cannot_run(here: Path, module: str) -> None:
    (here / "it.py").touch()
    (here / "broken.py").write_text("import no_such_thing")
    assert same(here, "-m", module).code == 1


@pytest.mark.parametrize(
    "source",
    [
        "# -*- coding: latin-1 -*-\nprint(ascii('é'))\nraise ValueError('é')".encode("latin-1"),
        "# coding: latin-1\né = = 1".encode("latin-1"),
        b"\xef\xbb\xbf" + "print(ascii('é'))\n1 / 0".encode(),
        "é = 'ü'; 1 / 0  # ß".encode(),
        "é = = 1".encode(),
        b"print(1)\r\nx = '''a\r\nb'''\r\nprint(ascii(x))\r\n1 / 0\r\n",
        b"\x0cprint(1)\n\t\n1 / 0",
    ],
    ids=["latin-1", "latin-1-syntax", "bom", "utf-8", "utf-8-syntax", "crlf", "blanks"],
)
def test_the_encoding_of_a_script(here: Path, source: bytes) -> None:
    (here / "it.py").write_bytes(source)
    same(here, "it.py")


@pytest.mark.parametrize("source", [b"# coding: no-such-codec\n", b"x = '\xe9'\n"])
def test_a_script_that_is_no_text(here: Path, source: bytes) -> None:
    (here / "it.py").write_bytes(source)
    for outcome in (python(here, "it.py"), python(here, *COMMAND, "it.py")):  # in words of their own
        assert (outcome.code, outcome.out) == (1, "")
        assert "Error: " in outcome.err
        assert "runner.py" not in outcome.err


def test_a_compiled_script(here: Path) -> None:
    (here / "show.py").write_text(SHOW)
    py_compile.compile(str(here / "show.py"), cfile=str(here / "done.pyc"), doraise=True)
    if python(here, "done.pyc").code == 0:  # else the tests are driven by one version and run by another
        same(here, "done.pyc", "a")


@pytest.mark.parametrize("flags", [("-O",), ("-OO",), ("-W", "error"), ("-X", "dev")], ids=" ".join)
def test_options_of_the_interpreter_count(here: Path, flags: tuple[str, ...]) -> None:
    (here / "it.py").write_text(
        "'''Doc.'''\nimport warnings\nprint(__doc__, __debug__)\nwarnings.warn('w')\nassert 0, 'a'"
    )
    same(here, "it.py", flags=flags)


PROCESSES = """\
import multiprocessing as mp, os, sys

class Box:
    def __init__(self, x): self.x = x

def double(box):
    return Box(box.x * 2), __name__, __file__, sys.argv, sys.path[0]

if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    with context.Pool(1) as pool:
        (box, *rest), = pool.map(double, [Box(21)])
        print(type(box) is Box, box.x, rest)
    process = context.Process(target=sys.exit, args=(7,))
    process.start(); process.join()
    print(process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("words", [("work.py",), ("-m", "work"), ("-m", "pack.work")], ids=" ".join)
def test_processes_of_the_script(here: Path, method: str, words: tuple[str, ...]) -> None:
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").touch()
    for folder in (here, here / "pack"):
        (folder / "work.py").write_text(PROCESSES)
    if method == "fork" and words != ("work.py",):
        return  # nothing is imported anew there
    outcome = same(here, *words, method)
    assert (outcome.code, outcome.out[:7], outcome.out[-2:]) == (0, "True 42", "7\n"), outcome.err


@pytest.fixture
def broken_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("source", ["print('x')", "print('x' * 10**6)", "print('x', flush=True)", "print('x'); 1 / 0"])
def test_a_broken_pipe(here: Path, source: str, broken_pipe: int) -> None:
    (here / "it.py").write_text(source)
    assert same(here, "it.py", stdout=broken_pipe).code != 0


@pytest.mark.parametrize(
    "word", ["python", "python3", "python3.11", "python.exe", sys.executable, "/opt/env/bin/python3"]
)
def test_the_interpreter_of_a_pasted_command_is_skipped(here: Path, word: str) -> None:
    (here / "python").mkdir()  # the bare word means the interpreter all the same
    (here / "it.py").write_text("import sys; print(sys.argv)")
    assert python(here, *COMMAND, word, "it.py", "-x") == Outcome(0, "['it.py', '-x']\n", "")


def test_a_folder_named_python_is_no_interpreter(here: Path) -> None:
    (here / "python").mkdir()
    (here / "python" / "__main__.py").write_text("import sys; print(sys.argv)")
    assert same(here, "./python", "a").out == "['./python', 'a']\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "no script given: expected script.py, -m module or -c code"),
        ([""], "no script given"),
        (["python3"], "no script given"),
        (["-m"], "nothing after -m"),
        (["python", "-c"], "nothing after -c"),
        (["-"], "save the code to a file"),
        (["-u", "main.py"], "'-u' is an option, not a script: .*python -u -m ace_plugins run"),
        (["mian.py"], r"no script 'mian.py': expected a Python file, .*; did you mean 'main.py'\?"),
        (["main"], r"no script 'main': .*did you mean 'main.py'\?"),
        (["python", "sub/tran.py", "x"], r"no script 'sub/tran.py': .*did you mean 'sub/train.py'\?"),
        (["zzz/a.py"], "no script 'zzz/a.py': .*; correct the path, it is taken from"),
        (["main.py/a.py"], "no script 'main.py/a.py'"),
        (
            ["sub"],
            "no __main__.py in 'sub': expected a Python file, or a folder or zip file with __main__.py",
        ),
        (["mains"], r"no __main__.py in 'mains': .*did you mean 'mains/main.py'\?"),
        (["empty.zip"], "no __main__.py in 'empty.zip'"),
    ],
)
def test_no_such_program(here: Path, argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("main.py", "sub/train.py", "mains/main.py"):
        (here / path).parent.mkdir(exist_ok=True)
        (here / path).touch()
    with zipfile.ZipFile(here / "empty.zip", "w") as archive:
        archive.writestr("other.py", "")
    monkeypatch.chdir(here)
    before = list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook
    with pytest.raises(runner.ScriptError, match=expected) as caught:
        runner.run_script(argv)
    assert (list(sys.argv), list(sys.path), sys.modules["__main__"], sys.excepthook) == before
    assert isinstance(caught.value, AceError)
    assert "\n" not in str(caught.value)


def test_a_script_that_cannot_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    (here / "main.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(runner.io, "open_code", denied)
    with pytest.raises(runner.ScriptError, match=r"cannot read script 'main.py' \(Permission denied\): .*permissions"):
        runner.run_script(["main.py"])


def test_a_launch_is_light(here: Path) -> None:
    (here / "it.py").write_text("import sys; print({'torch', 'click', 'rich'} & set(sys.modules))")
    assert python(here, *COMMAND, "it.py").out == "set()\n"
