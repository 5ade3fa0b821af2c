"""Mode auto in training: what it keeps, what it removes, and which model is evaluated meanwhile."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clouds import CloudAdapter, Run, start
from drawn import build

from ace_plugins import project, status, use_branches
from ace_plugins.engine.evidence import cycle
from ace_plugins.errors import ConfigError
from ace_plugins.plugins.registry import registry
from ace_plugins.report.record import RECORDER

STEPS = 600


@pytest.fixture(autouse=True)
def _clouds() -> Iterator[None]:
    registry().add(CloudAdapter(), "cloud")
    yield
    registry().remove("cloud")


def auto(samples: int, strength: float, seed: int = 0, steps: int = STEPS, **settings: Any) -> Run:
    return start(samples, strength, seed, steps, mode="auto", **settings)


def bits(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("samples", "strength"), [(200, 0.0), (2000, 0.0), (200, 1.0), (2000, 0.3)])
def test_branches_stay_where_the_data_break_the_symmetry_and_only_there(
    samples: int, strength: float, seed: int
) -> None:
    run = auto(samples, strength, seed).train()
    now = status(run.model)
    words = {site.verdict for site in now.sites}
    plain = start(samples, strength, seed, STEPS).train()
    ratio = run.test() / plain.test()
    if strength:
        assert "breaks" in words
        assert run.model.ace.in_eval
        assert ratio < 0.8
        kept = [site for site in now.sites if site.verdict == "breaks"]
        assert all(site.p < 0.001 and site.benefit > 0.01 and site.gamma >= 0.1 for site in kept)
    else:
        assert now.landed
        assert words <= {"fits", "undecided"}
        assert ratio < 1.1


def test_after_the_landing_the_model_is_upstream_and_nothing_else_trains() -> None:
    run = auto(400, 0.0).train()
    model = run.model
    assert model.ace.landed
    assert run.done == STEPS
    assert 0.25 * STEPS <= RECORDER.get_record(model).landed_at <= 0.75 * STEPS
    assert model.ace.duals.count == STEPS, "steps after the landing count"
    x = run.task.x_test[:50]
    with torch.no_grad():
        evaluated = model.eval()(x)
        trained = model.train()(x)
        plain = project(copy.deepcopy(model)).eval()(x)
    assert torch.equal(evaluated, plain)
    assert torch.equal(trained, plain)


def test_the_script_never_evaluates_a_branch_that_was_not_kept() -> None:
    run = auto(2000, 1.0)
    x = run.task.x_test[:50]
    seen = set()
    for until in range(20, STEPS + 1, 20):
        run.train(until)
        ace, kept = run.model.ace, frozenset(run.model.ace.duals.evidence.kept_sites)
        seen.add(len(kept))
        with torch.no_grad():
            found = run.model.eval()(x)
            gamma = ace.gamma.clone()
            ace.gamma.copy_(torch.tensor([g if n in kept else 0.0 for n, g in enumerate(gamma.tolist())]))
            with use_branches(run.model, on=True):
                expected = run.model(x)
            ace.gamma.copy_(gamma)
        torch.testing.assert_close(found, expected)
    assert 0 in seen
    assert max(seen) > 0


def test_the_best_checkpoint_evaluates_as_it_did_when_it_was_saved() -> None:
    """A script that keeps its best epoch gets a model that the run could deploy, whenever the best epoch was."""
    for strength in (0.0, 1.0):
        run = auto(400, strength)
        checkpoints = []
        for until in range(60, STEPS + 1, 60):
            run.train(until)
            checkpoints.append((run.test(), copy.deepcopy(run.model.state_dict())))
        for error, state in checkpoints:
            run.model.load_state_dict(state)
            assert run.test() == error
            fresh = auto(400, strength)
            fresh.model.load_state_dict(state)
            assert fresh.test() == error


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_a_resumed_run_is_bit_identical(strength: float) -> None:
    whole = auto(300, strength).train()
    for until in (150, 333):
        first = auto(300, strength).train(until)
        file = io.BytesIO()
        torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.schedule.state_dict()], file)
        file.seek(0)
        second = auto(300, strength)
        model, optimizer, schedule = torch.load(file)
        second.model.load_state_dict(model)
        second.optimizer.load_state_dict(optimizer)
        second.schedule.load_state_dict(schedule)
        second.done = until
        second.train()
        assert same(bits(second.model), bits(whole.model))


def test_decisions_do_not_depend_on_the_scale_of_the_loss() -> None:
    one = auto(400, 0.3).train(scale=1.0)
    two = auto(400, 0.3).train(scale=1024.0)
    assert one.model.ace.duals.evidence.kept_sites == two.model.ace.duals.evidence.kept_sites
    torch.testing.assert_close(one.model.ace.gamma, two.model.ace.gamma, rtol=1e-2, atol=1e-3)


def test_an_unused_site_is_reported_as_such() -> None:
    run = auto(200, 0.0)
    silent = run.model.layers[2].register_forward_hook(lambda module, args, output: output.detach() * 0)
    run.train(300)
    silent.remove()
    words = {site.name: site.verdict for site in status(run.model).sites}
    assert words["layers.2"] == "unused"
    assert words["layers.0"] != "unused"


def test_gamma_stays_positive_until_the_decision_so_that_branches_go_on_learning() -> None:
    run = auto(200, 0.0)
    for until in range(50, 450, 50):
        run.train(until)
        if run.model.ace.landed:
            assert until >= STEPS // 4
            break
        assert float(run.model.ace.gamma.detach().min()) >= 0.01 - 1e-6


def test_a_third_of_a_run_gets_no_decision_but_advice() -> None:
    run = auto(200, 0.0).train(STEPS // 3)
    now = status(run.model)
    assert {site.verdict for site in now.sites} == {"undecided"}
    assert f"budget = {STEPS // 3}" in now.verdict


def test_following_this_advice_leads_to_a_decision() -> None:
    run = auto(200, 0.0, steps=STEPS // 3).train()
    assert status(run.model).landed


def test_auto_needs_the_paced_loop_and_judges() -> None:
    for settings, field in (({"mode": "auto", "loop": "paper"}, "mode"), ({"mode": "auto", "holdout": 0}, "holdout")):
        with pytest.raises(ConfigError) as caught:
            build(settings)
        assert [name for name, _ in caught.value.problems] == [field]
    assert build({}).mode == "auto"


def test_probes_end_with_the_decision() -> None:
    run = auto(2000, 1.0).train()
    ace = run.model.ace
    assert len(ace.duals.evidence.kept_sites | ace.duals.landed_sites) == 3
    assert not bool(ace.duals.evidence.probing.any())
    assert cycle(0.75 * STEPS) > 1


def test_branches_that_raise_the_loss_are_removed_before_the_horizon_ends() -> None:
    """With few samples and no break, branches that learn noise raise the loss of the judges."""
    run = start(200, 0.0, 404, 1000, mode="auto")
    run.train(249)  # a third of the horizon has not passed
    assert not run.model.ace.landed
    run.train(500)
    assert run.model.ace.landed
    assert "fits" in {site.verdict for site in status(run.model).sites}
