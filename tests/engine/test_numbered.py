"""Exports of checkpoints that keep averages of the weights by number, as those of Lightning modules with an EMA do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Layered

from ace_plugins import AceError, AceWarning, attach, export


class Averages(nn.Module):
    """Copies of a model's parameters, as buffers with numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for number, parameter in enumerate(model.parameters()):
            self.register_buffer(f"weight_{number}", parameter.detach() + 1)


class Training(nn.Module):
    """Models and the averages of all their parameters."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleDict(models)
        self.ema = Averages(self.model)


def checkpoint(training: Training) -> dict[str, Any]:
    return {"epoch": 3, "state_dict": training.state_dict(), "callbacks": {"best": {"model": training.state_dict()}}}


def exported(content: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AceWarning)
        return export(content)


def averages_of(state: dict[str, Tensor]) -> list[Tensor]:
    return [value for name, value in state.items() if name.startswith("ema.")]


def models(*widths: int, **settings: Any) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Attached, and the same without ACE."""
    plain = {f"m{number}": Layered(width=width) for number, width in enumerate(widths)}
    return {name: attach(copy.deepcopy(model), **settings) for name, model in plain.items()}, plain


@pytest.mark.parametrize("settings", [{}, {"mode": "resilient", "spectral_norm": True}, {"mode": "scheduled"}])
def test_averages_by_number_lose_what_is_aces(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attached, plain = models(8, **settings)
    content = checkpoint(Training(**attached))
    found = exported(content)
    expected = Training(**plain)
    for state in (found["state_dict"], found["callbacks"]["best"]["model"]):
        expected.load_state_dict(state, strict=True)
        for average, parameter in zip(averages_of(state), expected.model.parameters(), strict=True):
            assert torch.equal(average, parameter + 1)
    assert content["state_dict"].keys() == Training(**attached).state_dict().keys(), "the original is untouched"


def test_weights_after_the_models_keep_their_place() -> None:
    attached, plain = models(8)
    training = Training(**attached, head=nn.Linear(5, 2))
    found = exported(training.state_dict())
    Training(**plain, head=nn.Linear(5, 2)).load_state_dict(found, strict=True)
    assert torch.equal(averages_of(found)[-1], training.model["head"].bias + 1)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("settings", [{}, {"mode": "resilient", "spectral_norm": True}])
def test_averages_in_a_list_lose_what_is_aces(settings: dict[str, Any]) -> None:
    """As torch_ema has them, in the state of a callback: of the model's parameters, not of all there are."""
    torch.manual_seed(0)
    attached, plain = models(8, **settings)
    other = [torch.zeros(3), torch.zeros(2, 2)]
    averages = [parameter + 1 for parameter in attached["m0"].parameters()]
    state = nn.ModuleDict({**attached, "head": nn.Linear(5, 2)}).state_dict()
    found = exported({"callbacks": {"ema": {"shadow": averages, "collected": None, "other": other}}, "state": state})
    kept = found["callbacks"]["ema"]
    for average, parameter in zip(kept["shadow"], plain["m0"].parameters(), strict=True):
        assert torch.equal(average, parameter + 1)
    assert (kept["collected"], kept["other"]) == (None, other)
    assert len(averages) > len(kept["shadow"]), "the original is untouched"


def test_other_numbered_tensors_stay() -> None:
    state = attach(Layered()).state_dict()
    own = {"loss_0": torch.zeros(3), "loss_1": torch.zeros(2), "table_7": torch.zeros(1)}
    assert exported({**state, **own}).keys() == {*Layered().state_dict(), *own}


def test_averages_of_two_models_are_refused() -> None:
    attached, _ = models(8, 8)
    with pytest.raises(AceError, match=r"ema.weight_0 to ema.weight_\d+.* 2 parts of them"):
        export(Training(**attached).state_dict())
