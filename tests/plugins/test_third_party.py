"""Strangers' plugins, installed by pip: an adapter, an observer, and beside them a broken one of each kind."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from clones import ace, python
from test_plugins import install

import ace_plugins

pytest.importorskip("egnn_pytorch", reason="needs egnn-pytorch: pip install egnn-pytorch")
pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")

PACKAGES = Path(__file__).parents[1] / "third_party"
GOOD = """
    from ace_plugins.adapter import Upstream, hookimpl
    @hookimpl
    def ace_upstream(): return Upstream("Net", ("net:Net",))
"""
BROKEN: dict[str, tuple[str, tuple[str, ...], str]] = {
    "removed": (
        GOOD + "    @hookimpl\n    def ace_warmup(model): pass\n",
        (),
        f"unknown hook ace_warmup: the hooks of ace-plugins {ace_plugins.__version__} are ace_att.*",
    ),
    "misspelt": (
        GOOD + "    @hookimpl\n    def ace_layer(model): pass\n",
        (),
        "unknown hook ace_layer: the hooks of ace-plugins",
    ),
    "raises": ("1 / 0", (), "could not be imported: ZeroDivisionError: division by zero"),
    "typed": (
        GOOD.replace('Upstream("Net", ("net:Net",))', '"net:Net"'),
        (),
        "ace_upstream returned str 'net:Net', expected Upstream(title, models)",
    ),
    "outdated": (
        GOOD,
        ('egnn-pytorch<0.2; extra == "upstream"',),
        "requires egnn-pytorch<0.2, found 0.2.8; pip install 'egnn-pytorch<0.2'",
    ),
    "early": (GOOD, ("ace-plugins>=9",), f"requires ace-plugins>=9, found {ace_plugins.__version__}; pip install"),
    "absent": (GOOD, ('no-such-net; extra == "upstream"',), "requires no-such-net, found none installed; pip install"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip put the sound ones. The broken ones lie beside them as pip would leave them."""
    where = tmp_path_factory.mktemp("site")
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(where)]
    done = python(where, *command, str(PACKAGES / "ace-egnn"), str(PACKAGES / "ace-diary"), PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    for kind, (source, requires, _) in BROKEN.items():
        install(where, f"ace-{kind}", kind, textwrap.dedent(source), requires)
    install(where, "ace-twin", "egnn", textwrap.dedent(GOOD))
    return where


def test_each_broken_one_is_reported_by_name_and_reason_while_the_others_work(site: Path) -> None:
    done = ace(site, "list", "--json", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, str], Any] = {(each["name"], each["distribution"]): each for each in json.loads(done.stdout)}
    for kind, (_, _, reason) in BROKEN.items():
        told = found[kind, f"ace-{kind}"]
        assert not told["healthy"]
        start, _, end = reason.partition(".*")
        assert told["problem"].startswith(start), told["problem"]
        assert end in told["problem"]
    twin = found["egnn", "ace-twin"]
    assert twin["problem"] == "its name is taken by ace-egnn (ace_egnn.plugin); uninstall one of the two"
    adapter, observer = found["egnn", "ace-egnn"], found["diary", "ace-diary"]
    assert (adapter["kind"], adapter["healthy"], adapter["version"]) == ("adapter", True, "0.1.0")
    assert (observer["kind"], observer["healthy"]) == ("observer", True)
    assert observer["hooks"] == ["ace_attached", "ace_finished", "ace_stepped"]


SCRIPT = """
    import torch
    from egnn_pytorch import EGNN_Network
    torch.manual_seed(0)
    model = EGNN_Network(num_tokens=8, dim=16, depth=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens, coors = torch.randint(8, (2, 6)), torch.randn(2, 6, 3)
    for _ in range(20):
        optimizer.zero_grad()
        feats, moved = model(tokens, coors)
        (feats.square().mean() + (moved - 1).square().mean()).backward()
        optimizer.step()
"""


def test_a_strangers_adapter_and_observer_at_work(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = ace(tmp_path, "run", "egnn", "--mode", "strict", "--budget", "20", "--", "train.py", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert "ace: egnn: attached to EGNN_Network, 4 sites, 12,298 parameters + 1,974 of ACE" in done.stderr
    diary = (tmp_path / "diary.txt").read_text().splitlines()
    assert diary[0] == "attached EGNN_Network: layers.0.feats, layers.0.coors, layers.1.feats, layers.1.coors"
    assert diary[1].startswith("step 5: gamma 0.0")
    assert diary[-1].startswith("finished after ")


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    words = ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = python(tmp_path, *words, str(PACKAGES / "ace-egnn"), PYTHONPATH=str(site), PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stdout
    assert "26 passed" in done.stdout
