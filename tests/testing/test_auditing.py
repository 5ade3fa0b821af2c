"""audit of models that were saved whole, which have sizes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Layered, VectorMaps

from ace_plugins import attach
from ace_plugins.errors import AdapterError, AttachError, CheckpointError
from ace_plugins.testing.audit import audit_example


def saved(model: Any, folder: Path) -> Path:
    torch.save(model, folder / "whole.pt")
    return folder / "whole.pt"


def test_a_plain_model(tmp_path: Path) -> None:
    path = saved(VectorMaps(channels=6), tmp_path)
    found = audit_example("vector_maps", checkpoint=path, trust=True, average=2)
    assert (found.found.verdict, found.branches, found.checkpoint) == ("symmetric", False, str(path))
    assert found.sites == {"map_to_feat": "map_to_feat", "map_to_dir": "map_to_dir"}
    with pytest.raises(AttachError, match="VectorMaps has no ACE attached"):
        audit_example("vector_maps", checkpoint=path, trust=True, branches_on=True)


def test_a_model_with_branches(tmp_path: Path) -> None:
    model = attach(VectorMaps(channels=6), mode="resilient", spectral_norm=True, trace=False)
    found = audit_example("vector_maps", checkpoint=saved(model, tmp_path), trust=True)
    assert (found.found.verdict, found.branches) == ("broken", True)
    without = audit_example("vector_maps", checkpoint=tmp_path / "whole.pt", trust=True, branches_on=False)
    assert (without.found.verdict, without.branches) == ("symmetric", False)


def test_refusals(tmp_path: Path) -> None:
    path = saved(VectorMaps(), tmp_path)
    with pytest.raises(CheckpointError, match="you trust it, add --trust"):
        audit_example("vector_maps", checkpoint=path)
    with pytest.raises(AdapterError, match="'layered' does not support toy:VectorMaps"):
        audit_example("layered", checkpoint=path, trust=True)
    with pytest.raises(AdapterError, match=r"'layered' cannot make a batch"):
        audit_example("layered", checkpoint=saved(Layered(), tmp_path), trust=True)
