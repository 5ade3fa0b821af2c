from __future__ import annotations

from pathlib import Path

import pytest
from toy_clone import Clone


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)
