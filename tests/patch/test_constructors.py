"""patched: models are attached when their constructor returns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from toy import Layered

from ace_plugins import AceError, patched, status
from ace_plugins.adapter import AnyShim, Checkout, Node, Shim, Site, StandIn, Upstream, hookimpl
from ace_plugins.patch.constructors import CONSTRUCTORS
from ace_plugins.patch.shims import REPAIRS
from ace_plugins.plugins.registry import registry

SOURCE = """
from torch import nn
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def forward(self, x):
        return self.layer(x)
class Deeper(Net):
    def __init__(self):
        super().__init__(6)
        self.head = nn.Linear(6, 1)
    def forward(self, x):
        return self.head(super().forward(x))
"""


class NetAdapter:
    models: tuple[str, ...] = ("upstream_net:Net",)
    shimmed: Sequence[str] = ()

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream(title="Net", models=self.models)

    @hookimpl
    def ace_preset(self) -> dict[str, dict[str, Any]]:
        """The paper's loop, in which every training forward has its branches."""
        return {"fit": {"loop": "paper"}}

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        width = model.layer.out_features
        return [Site("layer", "layer", (width,), (width,))]

    @hookimpl
    def ace_shims(self) -> Sequence[Shim]:
        return [Shim("repair", "a test", lambda: True, lambda: self.__class__.shimmed.append("applied"))]  # type: ignore[attr-defined]


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[NetAdapter]]:
    (tmp_path / "upstream_net.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = type("Made", (NetAdapter,), {"shimmed": []})
    registry().add(made(), "net")
    yield made
    registry().remove("net")
    sys.modules.pop("upstream_net", None)
    REPAIRS.applied.discard(("net", "repair"))
    CONSTRUCTORS.patches.pop("upstream_net:Net", None)


def test_before_the_upstream_is_imported(adapter: type[NetAdapter]) -> None:
    with patched("net", mode="resilient"):
        assert "upstream_net" not in sys.modules, "patching imports nothing"
        net = importlib.import_module("upstream_net").Net()
        assert status(net).mode == "resilient"
        assert adapter.shimmed == ["applied"]
    plain = importlib.import_module("upstream_net").Net()
    assert status(plain).mode == "off"
    assert status(net).mode == "resilient", "attached models stay attached"


def test_what_upstream_cannot_be_imported_without_comes_first(adapter: type[NetAdapter]) -> None:
    def ace_shims(self: NetAdapter) -> Sequence[Shim]:
        done = self.__class__.shimmed.append  # type: ignore[attr-defined]
        return [
            Shim("repair", "a test", lambda: True, lambda: done(f"then {'upstream_net' in sys.modules}")),
            Shim("early", "a test", lambda: True, lambda: done(f"first {'upstream_net' in sys.modules}"), first=True),
        ]

    registry().remove("net")
    registry().add(type("Early", (adapter,), {"ace_shims": hookimpl(ace_shims), "shimmed": (shimmed := [])})(), "net")
    REPAIRS.make_importable()
    assert shimmed == ["first False"], "for models that were saved whole, and are about to be read"
    REPAIRS.applied.discard(("net", "early"))
    shimmed.clear()
    with patched("net"):
        assert shimmed == ["first False"]
        importlib.import_module("upstream_net")
    assert shimmed == ["first False", "then True"]
    REPAIRS.applied.discard(("net", "early"))


def test_after_it_was_imported_by_name(adapter: type[NetAdapter]) -> None:
    Net = importlib.import_module("upstream_net").Net
    patch = patched("net")
    assert status(Net()).mode == "strict"
    assert isinstance(Net(), Net)
    assert type(Net()) is Net
    patch.undo()
    assert status(Net()).mode == "off"
    with patched("net", mode="bounded"):
        assert status(Net()).mode == "bounded"


def test_the_last_patch_counts_and_nesting_unwinds(adapter: type[NetAdapter]) -> None:
    Net = importlib.import_module("upstream_net").Net
    with patched("net", mode="strict"):
        with patched("net", mode="resilient"):
            assert status(Net()).mode == "resilient"
        assert status(Net()).mode == "strict"
    assert status(Net()).mode == "off"


def test_subclasses_are_attached_once(adapter: type[NetAdapter]) -> None:
    Deeper = importlib.import_module("upstream_net").Deeper
    with patched("net"):
        model = Deeper()
        assert len(status(model).sites) == 1
        assert not torch.equal(model(torch.ones(1, 6)), model.eval()(torch.ones(1, 6)))


def test_a_subclass_is_attached_when_its_own_constructor_is_done(adapter: type[NetAdapter]) -> None:
    upstream = importlib.import_module("upstream_net")

    class Wide(upstream.Net):
        def __init__(self) -> None:
            super().__init__(4)
            assert status(self).mode == "off"
            self.layer = nn.Linear(4, 9)

    with patched("net"):

        class Wider(Wide):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 12)

        for cls, width in ((Wide, 9), (Wider, 12), (upstream.Net, 4)):
            model = cls()
            assert model.ace.sites[0].width_out == width
    assert status(Wider()).mode == "off"


def test_adapters_of_related_classes(adapter: type[NetAdapter]) -> None:
    upstream = importlib.import_module("upstream_net")
    registry().add(type("Deep", (NetAdapter,), {"models": ("upstream_net:Deeper",), "shimmed": []})(), "deep")
    try:
        deep = patched("deep", mode="bounded")
        with patched("net"):
            assert status(upstream.Net()).mode == "strict"
            assert status(upstream.Deeper()).mode == "bounded", "the nearest class counts"
        assert status(upstream.Deeper()).mode == "bounded"
        deep.undo()
        assert status(upstream.Deeper()).mode == "off"
    finally:
        registry().remove("deep")


def test_a_constructor_that_fails_leaves_nothing(adapter: type[NetAdapter]) -> None:
    Net = importlib.import_module("upstream_net").Net
    with patched("net"):
        with pytest.raises(TypeError):
            Net("wide")
        assert status(Net()).mode == "strict"


def test_settings_are_checked_at_once(adapter: type[NetAdapter]) -> None:
    with pytest.raises(AceError, match="unknown mode 'hard'"):
        patched("net", mode="hard")
    with pytest.raises(AceError, match="unknown adapter 'nett': .*did you mean 'net'"):
        patched("nett")
    Net = importlib.import_module("upstream_net").Net
    assert status(Net()).mode == "off"


def test_an_upstream_without_the_class(adapter: type[NetAdapter], tmp_path: Path) -> None:
    (tmp_path / "upstream_net.py").write_text("class Other: pass\n")
    importlib.import_module("upstream_net")
    with pytest.raises(AceError, match="upstream's module upstream_net has no class Net"):
        patched("net")
    assert "upstream_net:Net" not in CONSTRUCTORS.patches, "a refused patch leaves nothing behind"
    assert CONSTRUCTORS.undo == []


def test_off_attaches_nothing_and_moves_no_random_number(adapter: type[NetAdapter]) -> None:
    Net = importlib.import_module("upstream_net").Net
    for mode in ("off", "strict"):
        torch.manual_seed(0)
        plain, after = Net(), torch.rand(3)
        torch.manual_seed(0)
        with patched("net", mode=mode):
            model = Net()
        assert torch.equal(after, torch.rand(3))
        assert torch.equal(plain.layer.weight, model.layer.weight)


def test_constructors_of_others_are_untouched(adapter: type[NetAdapter]) -> None:
    with patched("net"):
        assert status(Layered()).mode == "off"
        assert type(nn.Linear(2, 2).__init__).__name__ == "method"


class CheckoutAdapter(NetAdapter):
    models = ("models.net:Net", "models.more:Net")
    shimmed: Sequence[str] = []

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream("Net", self.models, Checkout("me/net", ("main.py",), {"models/net.py": "class Net: ..."}))


def test_another_projects_file_of_the_same_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many have a models/net.py; an upstream is a folder that holds its other files too."""
    (tmp_path / "theirs" / "models").mkdir(parents=True)
    (tmp_path / "theirs" / "models" / "net.py").write_text("Net = 'no class at all'\n")
    (tmp_path / "ours" / "pack" / "models").mkdir(parents=True)
    for file in ("net.py", "more.py"):
        (tmp_path / "ours" / "pack" / "models" / file).write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry().add(CheckoutAdapter(), "other")
    try:
        with patched("other"):
            assert importlib.import_module("theirs.models.net").Net == "no class at all"
            net = importlib.import_module("ours.pack.models.net").Net()
            assert status(net).mode == "strict"
            assert registry().find_adapter(net).name == "other"
    finally:
        registry().remove("other")
        for name in [name for name in sys.modules if name.startswith(("theirs", "ours"))]:
            del sys.modules[name]


class WithStandIn(CheckoutAdapter):
    models = ("models.net:Net",)

    @hookimpl
    def ace_shims(self) -> Sequence[AnyShim]:
        return [StandIn("no_such_library", "a test", lambda: ModuleType("no_such_library"))]


def test_stand_ins_are_there_as_long_as_a_patch_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clone" / "models").mkdir(parents=True)
    (tmp_path / "clone" / "models" / "net.py").write_text(SOURCE)
    for name in ("first", "second", "third"):
        (tmp_path / "clone" / f"{name}.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry().add(WithStandIn(), "standing")
    try:
        outer, inner = patched("standing"), patched("standing", mode="off")
        importlib.import_module("clone.first")
        inner.undo()
        del sys.modules["no_such_library"]
        importlib.import_module("clone.second")  # the other patch still counts on it
        outer.undo()
        del sys.modules["no_such_library"]
        with pytest.raises(ModuleNotFoundError, match="no_such_library"):
            importlib.import_module("clone.third")
    finally:
        registry().remove("standing")
        for name in [name for name in sys.modules if name.startswith("clone")]:
            del sys.modules[name]


def test_everything_is_as_before_when_the_last_patch_ends(adapter: type[NetAdapter]) -> None:
    upstream = importlib.import_module("upstream_net")
    finders, inits = list(sys.meta_path), [vars(cls)["__init__"] for cls in (upstream.Net, upstream.Deeper)]
    with patched("net"):
        with patched("net", mode="bounded"):
            assert vars(upstream.Net)["__init__"] is not inits[0]

            class Later(upstream.Net):  # type: ignore[name-defined,misc]
                def __init__(self) -> None:
                    super().__init__()

        assert status(Later()).mode == "strict", "the outer patch is still in effect"
    assert [vars(cls)["__init__"] for cls in (upstream.Net, upstream.Deeper)] == inits
    assert "__init_subclass__" not in vars(upstream.Net)
    assert vars(Later)["__init__"].__qualname__.endswith("Later.__init__")
    assert not hasattr(vars(Later)["__init__"], "__wrapped__")
    assert sys.meta_path == finders


def test_a_wrapper_of_somebody_else_stays(adapter: type[NetAdapter]) -> None:
    Net = importlib.import_module("upstream_net").Net
    with patched("net"):
        ours, calls = Net.__init__, []

        def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(self)
            ours(self, *args, **kwargs)

        Net.__init__ = theirs
    assert Net.__init__ is theirs
    assert status(Net()).mode == "off"
    with patched("net"):
        assert status(Net()).mode == "strict"
    assert Net.__init__ is theirs
    assert len(calls) == 2
