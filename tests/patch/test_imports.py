"""Being told of imports, and modules that stand in for others: whoever imports, whatever the name, and nobody else."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import pickle
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ace_plugins.adapter import StandIn
from ace_plugins.patch import imports
from ace_plugins.patch.imports import ImportHook, StandIns, belongs, find_imported, is_file, whenever_imported

NET = """
class Net:
    def __init__(self, width):
        self.width = width
    def __eq__(self, other):
        return self.width == other.width
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from. What was imported and what was watched is forgotten afterwards."""
    root = tmp_path / "upstream"
    (root / "models").mkdir(parents=True)
    (root / "models/net.py").write_text(NET)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, ImportHook)])
    monkeypatch.setattr(imports, "_HOOK", ImportHook())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(root))
    known = {*sys.modules}
    yield root
    new = {name: module for name, module in sys.modules.items() if name not in known and isinstance(module, ModuleType)}
    told = {name: f"{module!r} {[*vars(module).get('__path__', ())]}" for name, module in new.items()}
    for name, text in told.items():
        if str(tmp_path) in text or "stub of ace-plugins" in text:
            del sys.modules[name]
    assert "models" not in sys.modules


class Met(list[str]):
    """The names of the modules it was called with."""

    def __call__(self, module: ModuleType) -> None:
        self.append(module.__name__)
        assert sys.modules[module.__name__] is module


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def test_a_module_is_met_by_its_name_when_it_has_run(folder: Path) -> None:
    seen = []
    whenever_imported(lambda module: seen.append(module.Net(3).width), name="models.net")
    assert "models.net" not in sys.modules, "watching imports nothing"
    net = importlib.import_module("models.net")
    assert seen == [3]
    importlib.import_module("models.net")
    assert seen == [3], "once"
    assert [*find_imported(name="models.net")] == [net]
    assert [*find_imported(name="models.nets")] == []


def test_a_name_is_the_whole_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met = Met()
    whenever_imported(met, name="net")
    importlib.import_module("models.net")
    assert met == []
    monkeypatch.syspath_prepend(str(folder / "models"))
    importlib.import_module("net")
    assert met == ["net"]


def test_a_file_is_met_under_every_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder / "pack/__init__.py", "")
    written(folder / "pack/models/net.py", NET)
    written(folder / "pack/models/net_too.py", NET)
    written(folder / "mymodels/net.py", NET)
    monkeypatch.syspath_prepend(str(folder / "models"))
    met = Met()
    whenever_imported(met, file="models/net.py")
    for name in ("models.net", "net", "pack.models.net"):
        assert importlib.import_module(name).Net
    assert met == ["models.net", "net", "pack.models.net"]
    for name in ("pack.models.net_too", "mymodels.net"):
        importlib.import_module(name)
    assert len(met) == 3
    assert {module.__name__ for module in find_imported(file="models/net.py")} == set(met)


def test_a_package_is_met_by_its_file(folder: Path) -> None:
    written(folder / "pack/sub/__init__.py", NET)
    met = Met()
    whenever_imported(met, file="pack/sub/__init__.py")
    whenever_imported(met, file="pack/__init__.py")
    importlib.import_module("pack.sub")
    assert met == ["pack.sub"], "pack itself has no file"


def test_several_are_called_in_order_and_one_may_watch_more(folder: Path) -> None:
    told = []

    def first(module: ModuleType) -> None:
        told.append("first")
        whenever_imported(lambda module: told.append("later"), name="models.other")

    written(folder / "models/other.py", "")
    whenever_imported(first, file="models/net.py")
    whenever_imported(lambda module: told.append("second"), name="models.net", file="models/net.py")
    importlib.import_module("models.net")
    importlib.import_module("models.other")
    assert told == ["first", "second", "later"]
    assert sum(isinstance(finder, ImportHook) for finder in sys.meta_path) == 1


def test_a_module_that_is_there_already_is_met_when_it_is_reloaded(folder: Path) -> None:
    net = importlib.import_module("models.net")
    old = net.Net
    met = Met()
    whenever_imported(met, file="models/net.py")
    assert met == ["models.net"]
    assert importlib.reload(net) is net
    assert met == ["models.net"] * 2
    assert net.Net is not old


def test_a_module_that_fails_is_not_met_until_it_does_not(folder: Path) -> None:
    met = Met()
    whenever_imported(met, file="models/net.py")
    for text, error in (("1 / 0", ZeroDivisionError), ("import no_such_thing", ImportError), ("def (", SyntaxError)):
        written(folder / "models/net.py", text)
        with pytest.raises(error):
            importlib.import_module("models.net")
        assert met == []
        assert "models.net" not in sys.modules
    written(folder / "models/net.py", NET)
    importlib.import_module("models.net")
    assert met == ["models.net"]


def test_what_the_callback_raises_ends_the_import(folder: Path) -> None:
    def refuse(module: ModuleType) -> None:
        raise LookupError("does not fit")

    whenever_imported(refuse, name="models.net")
    with pytest.raises(LookupError, match="does not fit"):
        importlib.import_module("models.net")
    assert "models.net" not in sys.modules


def test_modules_that_import_each_other(folder: Path) -> None:
    written(folder / "models/net.py", f"import models.a\n{NET}")
    written(folder / "models/a.py", "import models.net\nimport models.b")
    written(folder / "models/b.py", "from models import net, a")
    met = Met()
    for name in ("net", "a", "b"):
        whenever_imported(met, file=f"models/{name}.py")
    importlib.import_module("models.net")
    assert met == ["models.b", "models.a", "models.net"], "each when it has run"


def test_a_module_that_still_runs_is_not_there_yet(folder: Path) -> None:
    written(
        folder / "models/net.py",
        "from ace_plugins.patch.imports import find_imported\n"
        "found = [*find_imported(name='models.net'), *find_imported(file='models/net.py')]",
    )
    net = importlib.import_module("models.net")
    assert net.found == []
    assert [*find_imported(file="models/net.py")] == [net]


def test_odd_things_among_the_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    for name, thing in (("odd_a", Odd()), ("odd_b", None), ("odd_c", object()), ("odd_d", ModuleType("odd_d"))):
        monkeypatch.setitem(sys.modules, name, thing)
    assert [*find_imported(name="odd_a"), *find_imported(file="odd_a.py"), *find_imported(name="odd_d")] == []


def test_a_module_is_as_it_would_be_without(folder: Path) -> None:
    plain = importlib.import_module("models.net")
    attributes = {name: type(value) for name, value in vars(plain).items()}
    origin, loader = plain.__spec__.origin, type(plain.__spec__.loader)
    del sys.modules["models.net"]
    whenever_imported(Met(), file="models/net.py")
    net = importlib.import_module("models.net")
    assert {name: type(value) for name, value in vars(net).items()} == attributes
    assert type(net.__spec__.loader) is loader is importlib.machinery.SourceFileLoader
    assert net.__loader__ is net.__spec__.loader
    assert net.__spec__.origin == origin
    assert "def __init__(self, width)" in inspect.getsource(net.Net)
    assert inspect.getsource(net) == NET
    assert pickle.loads(pickle.dumps(net.Net(5))) == net.Net(5)
    assert pickle.loads(pickle.dumps(net.Net)) is net.Net


def test_a_loader_that_serves_many_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "zipped.zip", "w") as file:
        for name in ("net", "other"):
            file.writestr(f"zipped/models/{name}.py", NET)
        file.writestr("zipped/__init__.py", "")
        file.writestr("zipped/models/__init__.py", "")
    monkeypatch.syspath_prepend(str(folder / "zipped.zip"))
    met = Met()
    whenever_imported(met, file="models/net.py")
    whenever_imported(met, file="models/other.py")
    for name in ("net", "other"):
        importlib.import_module(f"zipped.models.{name}")
        importlib.reload(sys.modules[f"zipped.models.{name}"])
    assert met == ["zipped.models.net"] * 2 + ["zipped.models.other"] * 2, "once each time"


def test_finders_that_ask_again_themselves(folder: Path) -> None:
    asked = []

    class Asking:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name == "models.net" and len(asked) < 5:
                asked.append(name)
                return importlib.util.find_spec(name)
            return None

    met = Met()
    whenever_imported(met, file="models/net.py")
    sys.meta_path.insert(1, Asking())  # type: ignore[arg-type]
    importlib.import_module("models.net")
    assert met == ["models.net"]


def test_threads_that_import_at_once(folder: Path) -> None:
    names = [f"models.many{number}.net" for number in range(6)]
    for name in names:
        written(folder / (name.replace(".", "/") + ".py"), f"import time\ntime.sleep(0.01)\n{NET}")
    met = Met()
    whenever_imported(met, file="net.py")
    met.clear()  # other tests may have imported a net.py of their own
    failed = []

    def work() -> None:
        for name in names:
            try:
                assert importlib.import_module(name).Net(1).width == 1
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sorted(met) == names
    assert imports._HOOK.searching == set()


def test_what_is_not_watched_is_not_looked_for(folder: Path) -> None:
    whenever_imported(Met(), file="models/net.py")
    calls = []

    class Counting:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            calls.append(name)

    written(folder / "other.py", "")
    sys.meta_path.insert(1, Counting())  # type: ignore[arg-type]
    importlib.import_module("other")
    assert calls.count("other") == 1, "by the import alone, not by the watch besides"


def test_files_are_known_by_the_end_of_their_path() -> None:
    assert all(is_file(path, "models/net.py") for path in ("/a/models/net.py", "models/net.py"))
    for other in ("/a/mymodels/net.py", "/a/models/net.pyc", "built-in", "", None):
        assert not is_file(other, "models/net.py")


FILES = ("models/net.py",)


def stand_in(name: str = "scatter_lib", reason: str = "a test") -> StandIn:
    def make() -> ModuleType:
        module = ModuleType(name)
        module.__dict__["who"] = reason
        return module

    return StandIn(name, reason, make)


@pytest.fixture
def stand_ins(folder: Path) -> StandIns:
    """The folder's ``sys.meta_path`` is given back afterwards, and with it goes the finder."""
    return StandIns()


def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: str = "elsewhere") -> str:
    """A module of somebody else."""
    written(tmp_path / where / "library.py", text)
    monkeypatch.syspath_prepend(str(tmp_path / where))
    return "library"


PROBE = """
try:
    import scatter_lib
except ImportError as error:
    scatter_lib = None
    problem = error
"""


@pytest.mark.parametrize(
    "text",
    [
        "import scatter_lib",
        "import importlib\nscatter_lib = importlib.import_module('scatter_lib')",
        "scatter_lib = __import__('scatter_lib')",
        "exec('import scatter_lib')",
        "def f():\n    import scatter_lib\n    return scatter_lib\nscatter_lib = f()",
        "import importlib.util\nassert importlib.util.find_spec('scatter_lib')\nimport scatter_lib",
        "__name__ = None\nimport scatter_lib",
    ],
)
@pytest.mark.parametrize("where", ["main_script", "deep/er/main_script"])
def test_ways_to_import_it(folder: Path, stand_ins: StandIns, text: str, where: str) -> None:
    stand_ins.offer([stand_in()], FILES)
    written(folder / f"{where}.py", text)
    name = where.replace("/", ".")
    if "__name__" in text:
        scope: dict[str, Any] = {}
        exec(compile(text, str(folder / "main_script.py"), "exec"), scope)
        assert scope["scatter_lib"].who == "a test"
        return
    made = importlib.import_module(name).scatter_lib
    assert made.who == "a test"
    assert made.__spec__.origin == "stub of ace-plugins for scatter_lib"
    assert stand_ins.active == {"scatter_lib"}


@pytest.mark.parametrize(
    "text",
    [
        "import scatter_lib",
        "import importlib\nimportlib.import_module('scatter_lib')",
        "exec('import scatter_lib')",
        "exec(compile('import scatter_lib', '<string>', 'exec'), {'__name__': 'ace_plugins.x'})",
    ],
)
def test_nobody_else_gets_it(
    folder: Path, tmp_path: Path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(folder)  # where people run their scripts
    stand_ins.offer([stand_in()], FILES)
    library = outside(tmp_path, monkeypatch, text)
    written(folder / "main_script.py", f"import {library}")
    with pytest.raises(ModuleNotFoundError, match="No module named 'scatter_lib'"):
        importlib.import_module(library)
    with pytest.raises(ModuleNotFoundError, match="No module named 'scatter_lib'"):
        importlib.import_module("main_script")
    assert stand_ins.active == set()


def test_code_that_is_in_no_file_gets_nothing(
    folder: Path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    stand_ins.offer([stand_in()], FILES)
    with pytest.raises(ModuleNotFoundError):
        exec(compile("import scatter_lib", "<string>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("where", ["elsewhere", "upstream/.venv/lib/python3/site-packages", "upstream/v/dist-packages"])
def test_a_library_that_probes_finds_nothing(
    folder: Path, tmp_path: Path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    stand_ins.offer([stand_in()], FILES)
    search = "import importlib.util\nspec = importlib.util.find_spec('scatter_lib')\n"
    library = outside(tmp_path, monkeypatch, search + PROBE, where)
    written(folder / "main_script.py", f"import {library}\nimport scatter_lib")
    main = importlib.import_module("main_script")
    assert main.library.spec is None
    assert main.library.scatter_lib is None
    assert isinstance(main.library.problem, ModuleNotFoundError)
    assert main.scatter_lib.who == "a test"


def test_a_module_that_is_really_installed_wins(
    folder: Path, tmp_path: Path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.offer([stand_in()], FILES)
    written(tmp_path / "installed/scatter_lib.py", "who = 'the real one'")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    written(folder / "main_script.py", "import scatter_lib")
    assert importlib.import_module("main_script").scatter_lib.who == "the real one"
    assert stand_ins.active == set()


def test_one_that_cannot_be_made_is_not_active(folder: Path, stand_ins: StandIns) -> None:
    tries = []

    def make() -> ModuleType:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("not now")
        return ModuleType("scatter_lib")

    stand_ins.offer([StandIn("scatter_lib", "a test", make)], FILES)
    written(folder / "main_script.py", "import scatter_lib")
    with pytest.raises(RuntimeError, match="not now"):
        importlib.import_module("main_script")
    assert stand_ins.active == set()
    assert "scatter_lib" not in sys.modules
    importlib.import_module("main_script")
    assert stand_ins.active == {"scatter_lib"}


def test_withdrawn_it_is_gone_but_for_what_was_made(folder: Path, stand_ins: StandIns) -> None:
    stand_ins.offer([stand_in(), stand_in("wand_lib")], FILES)
    written(folder / "main_script.py", "import scatter_lib")
    importlib.import_module("main_script")
    stand_ins.offer([], FILES)
    stand_ins.offer([], ("never/offered.py",))
    assert stand_ins.offered == {}
    assert stand_ins.active == {"scatter_lib"}, "upstream goes on using it"
    written(folder / "second_script.py", "import scatter_lib\nimport wand_lib")
    with pytest.raises(ModuleNotFoundError, match="wand_lib"):
        importlib.import_module("second_script")


def test_two_upstreams_may_miss_the_same_module(folder: Path, tmp_path: Path, stand_ins: StandIns) -> None:
    written(tmp_path / "second/nets/two.py", "")
    mine, theirs = stand_in(reason="mine"), stand_in(reason="theirs")
    stand_ins.offer([mine], FILES)
    stand_ins.offer([theirs], ("nets/two.py",))
    stand_ins.offer([mine], FILES)
    scopes: list[dict[str, Any]] = [{}, {}]
    for place, scope in zip((folder, tmp_path / "second"), scopes, strict=True):
        exec(compile("import scatter_lib", str(place / "run.py"), "exec"), scope)
        del sys.modules["scatter_lib"]
    assert [scope["scatter_lib"].who for scope in scopes] == ["mine", "theirs"]
    stand_ins.offer([], ("nets/two.py",))
    exec(compile("import scatter_lib", str(folder / "run.py"), "exec"), scopes[0])
    assert scopes[0]["scatter_lib"].who == "mine"


def test_it_gets_the_names_of_missing_modules(
    folder: Path, tmp_path: Path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    stand_ins.on_missing = lambda name, file: asked.append((name, file))
    stand_ins.install()
    stand_ins.install()
    assert sys.meta_path.count(stand_ins) == 1  # type: ignore[arg-type]
    library = outside(tmp_path, monkeypatch, PROBE)
    written(
        folder / "main_script.py", f"import {library}\nimport models.net\ntry: import wand_lib\nexcept ImportError: 0"
    )
    importlib.import_module("main_script")
    assert asked == [
        ("scatter_lib", str(tmp_path / "elsewhere/library.py")),
        ("wand_lib", str(folder / "main_script.py")),
    ]


def test_which_files_belong_to_an_upstream(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("models/net.py", "models/two.py")
    assert belongs(str(folder / "main.py"), FILES)
    assert belongs(str(folder / "models/net.py"), FILES)
    assert belongs(str(folder / "a/b/c/not_there.py"), FILES)
    assert not belongs(str(folder / "main.py"), both), "all of the files"
    assert not belongs(str(tmp_path / "main.py"), FILES)
    assert not belongs(str(folder.with_name("upstream2") / "main.py"), FILES)
    assert not belongs("", FILES)
    assert not belongs(str(folder / "main.py"), ()), "nothing tells such an upstream"
    (tmp_path / "link").symlink_to(folder)
    assert belongs(str(tmp_path / "link/main.py"), FILES)
    monkeypatch.chdir(folder)
    assert belongs("main.py", FILES)
