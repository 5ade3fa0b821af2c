"""QM9 from the installed package: known molecules, random draws, batches and errors."""

from __future__ import annotations

import csv
import importlib.metadata
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from ace_plugins.errors import AdapterError, ConfigError
from ace_schnet.demo import qm9

TOTAL = 130_831
PART = 43_610
"""Number of molecules in the first file."""


def installed() -> bool:
    try:
        importlib.metadata.distribution("qm9pack")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_data = pytest.mark.skipif(not installed(), reason="qm9pack is not installed (pip install qm9pack)")


@needs_data
@pytest.mark.parametrize(
    ("target", "value"), [("alpha", 13.21), ("mu", 0.0), ("gap", 0.5048), ("u0", -40.47893), ("rot_a", 157.7118)]
)
def test_methane(target: str, value: float) -> None:
    methane = qm9.read([0], target)
    assert methane.z.tolist() == [6, 1, 1, 1, 1]
    assert methane.sizes.tolist() == [5]
    assert methane.y.tolist() == [value]
    lengths = (methane.pos[1:] - methane.pos[0]).norm(dim=1)
    assert torch.allclose(lengths, torch.full((4,), 1.09), atol=0.01)


@needs_data
def test_rows_across_the_files_are_those_of_a_plain_csv_reader() -> None:
    rows = [PART - 1, PART, TOTAL - 1]
    found = qm9.read(rows, "cv")
    texts = []
    for path in qm9._files():
        with path.open(newline="") as file:
            lines = list(file)[1:]
        texts.append((lines[0], lines[-1]))
    expected = [next(csv.reader([text])) for text in (texts[0][1], texts[1][0], texts[2][1])]
    assert found.y.tolist() == [float(row[-1]) for row in expected]
    assert found.sizes.tolist() == [int(row[4]) for row in expected]
    assert found.rows.tolist() == rows


@needs_data
def test_the_draw_depends_on_the_seed_alone() -> None:
    one, again, other = qm9.load(60, "alpha", 3), qm9.load(60, "alpha", 3), qm9.load(60, "alpha", 4)
    for name in ("z", "pos", "y", "sizes", "rows"):
        assert torch.equal(getattr(one, name), getattr(again, name))
    assert not torch.equal(one.rows, other.rows)
    assert torch.equal(qm9.load(30, "alpha", 3).rows, one.rows[:30])
    assert torch.equal(qm9.load(60, "gap", 3).pos, one.pos)


@needs_data
def test_the_draw_is_uniform_over_all_of_qm9() -> None:
    rows = qm9.load(3000, "alpha", 0).rows
    assert len(set(rows.tolist())) == 3000
    assert int(rows.max()) < TOTAL
    tenths = torch.bincount(rows * 10 // TOTAL, minlength=10)
    assert len(tenths) == 10
    # 300 expected in each; the standard deviation is 16
    assert int((tenths - 300).abs().max()) < 80


@needs_data
def test_every_target_is_read_and_has_a_unit() -> None:
    assert len(qm9.TARGETS) == 15
    values = {name: qm9.read([20, 70_000], name).y for name in qm9.TARGETS}
    assert all(bool(y.isfinite().all()) for y in values.values())
    assert all(about.unit and about.description for about in qm9.TARGETS.values())
    assert torch.allclose(values["gap"], values["lumo"] - values["homo"], atol=2e-4)
    assert bool((values["g298"] < values["u0"]).all())


@needs_data
def test_a_batch_is_its_molecules_one_after_the_other() -> None:
    data = qm9.load(40, "alpha", 0)
    chosen = [7, 0, 39, 7]
    z, pos, batch, y = data.batch(torch.tensor(chosen))
    for place, molecule in enumerate(chosen):
        first = int(data.sizes[:molecule].sum())
        atoms = slice(first, first + int(data.sizes[molecule]))
        assert torch.equal(z[batch == place], data.z[atoms])
        assert torch.equal(pos[batch == place], data.pos[atoms])
    assert torch.equal(y, data.y[chosen])
    assert torch.equal(batch, batch.sort().values)


@needs_data
def test_pandas_is_not_imported() -> None:
    code = "import sys; from ace_schnet.demo import qm9; qm9.load(30, 'mu', 0); sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_data
def test_more_molecules_than_there_are() -> None:
    with pytest.raises(ConfigError, match="molecules 130832.*130831"):
        qm9.load(TOTAL + 1, "alpha", 0)


@needs_data
def test_rows_outside() -> None:
    with pytest.raises(ConfigError, match="expected 0 to 130830"):
        qm9.read([TOTAL], "alpha")


def test_too_few_molecules() -> None:
    with pytest.raises(ConfigError, match="molecules 29.*30"):
        qm9.load(29, "alpha", 0)


def test_an_unknown_target_names_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown QM9 target 'alhpa': .*did you mean 'alpha'"):
        qm9.load(100, "alhpa", 0)


def test_the_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(AdapterError, match=r"qm9pack.*pip install"):
        qm9.load(100, "alpha", 0)
