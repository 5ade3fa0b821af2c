"""Pages of which every block is run, and the completeness of the adapter guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from manual import Reader, blocks, environment, needs

from ace_plugins.plugins.registry import HOOKS
from ace_plugins.testing import CHECKS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if needs(page) is not None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("environment"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_works_as_the_page_describes(page: Path, made: dict[str, str], tmp_path: Path) -> None:
    for module in needs(page) or ():
        pytest.importorskip(module, reason=f"needs {module}")
    folder = tmp_path / "reader"
    folder.mkdir()
    Reader(folder, made).read(page)


def test_every_hook_has_a_section() -> None:
    page = (DOCS / "adapters.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### `(ace_\w+)`$", page, re.MULTILINE)) == HOOKS


def test_every_check_is_explained() -> None:
    page = (DOCS / "adapters.md").read_text(encoding="utf-8")
    table = page[page.index("\nThe checks:\n") : page.index("\n## Every hook")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(CHECKS)


def test_the_guides_adapter_is_the_one_that_is_tested() -> None:
    package = ROOT / "tests" / "third_party" / "ace-egnn"
    written = {block.title: block.text for block in blocks(DOCS / "adapters.md") if block.title}
    assert written["ace_egnn/plugin.py"] == (package / "ace_egnn" / "plugin.py").read_text(encoding="utf-8")


# Tests of the runner.


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```sh\necho one; false\n```\n", "exit code 1"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\nprint('one')\n```\n\n```text\ntwo\n```\n", "does not print, here,\n  two"),
        ("```sh\necho a; echo b\n```\n\n```text\nb\na\n```\n", "does not print, here,\n  a"),
        ("```toml\nx = 1\n```\n", "page.md line 1: a block of toml is not run: say why, or give it a title"),
        ("```\nx\n```\n", "a block of nothing is not run"),
    ],
)
def test_a_page_that_is_not_so_fails(page: str, complaint: str, made: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(pytest.fail.Exception, match=re.escape(complaint)):
        Reader(tmp_path, made).read(tmp_path / "page.md")


PAGE = """
```sh
mkdir -p here && cd here
```

```toml title="sub/file.toml"
x = 1
```

```sh
cat sub/file.toml
```

```text
x = ...
```

```python
x = open("sub/file.toml").read()
```

```python
print(x)
print("last")
```

```text
x = 1
last
```

<!-- not run: it would never end -->
```sh
sleep 100000
```
"""


def test_a_page_that_is_so_passes(made: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "page.md").write_text(PAGE)
    Reader(tmp_path / "work", made).read(tmp_path / "page.md")
    assert (tmp_path / "work" / "here" / "sub" / "file.toml").is_file()
