"""attach, project, status: every shape of site, and everything that can be refused."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from toy import Adapter, Layered, Pair, TwoOutputs, VectorMaps

from ace_plugins import AceError, AceWarning, attach, equivariance_error, project, status, use_branches
from ace_plugins.adapter import Site, Stem, Tap, hookimpl
from ace_plugins.contract.sites import Node
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import AdapterCheckError, check_adapter


def test_branch_reads_and_adds_where_the_site_declares() -> None:
    """Two outputs of one layer, a chain fed from a submodule's input, a stem fed from the model's own, and one that
    every layer goes through with its own input."""
    torch.manual_seed(1)
    plain = TwoOutputs(layers=2)
    model = attach(copy.deepcopy(plain), gamma_init=0.5)
    x, h = torch.randn(5, 3), torch.randn(5, 1)
    b = {name: model.ace.branch(name) for name in model.ace.nodes}
    node_input = torch.cat([h, x.square().sum(-1, keepdim=True)], -1)
    hh, xx, chain = plain.embedding(node_input), x, b["lift_h"](node_input)
    for i, layer in enumerate(plain.layers):
        x_in = xx
        xx, v, hh = layer(x_in, hh, v=x_in)
        chain = b[f"layers.{i}.h"](chain)
        hh = hh + 0.5 * chain
        xx = xx + 0.5 * b[f"layers.{i}.x"](b["turn_x"](x_in))
        xx = xx + v + 0.5 * b[f"layers.{i}.v"](b["lift_x"](x))
    for found, expected in zip(model(x, h=h), (xx, hh), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_shared_input_of_two_maps() -> None:
    torch.manual_seed(1)
    model = attach(VectorMaps(), gamma_init=0.25)
    x = torch.randn(5, 3, 4)
    p = model.map_to_feat(x)
    weight, bias = (getattr(model.ace.branch("map_to_feat").inner, name) for name in ("weight", "bias"))
    flat = (x.reshape(5, 12) @ weight.T + bias).reshape(5, 3, 4)
    with use_branches(model, False):
        assert torch.allclose(p, model.map_to_feat(x) + 0.25 * flat, atol=1e-6)


def test_status_counts_and_names() -> None:
    model = attach(Layered())
    before = sum(p.numel() for p in Layered().parameters())
    now = status(model)
    assert [site.name for site in now.sites] == ["layers.0", "layers.1", "layers.2"]
    assert now.upstream_parameters == before
    assert before + now.ace_parameters == sum(p.numel() for p in model.parameters())
    assert now.ace_parameters == 3 + now.stem_parameters + sum(site.branch_parameters for site in now.sites)
    assert now.to_dict()["sites"][0]["lambda"] == 0
    assert status(Layered()).mode == "off"


def test_gamma_is_one_vector_and_precise_in_half_models() -> None:
    model = attach(Layered().to(torch.bfloat16))
    assert [n for n, _ in model.ace.named_parameters() if "branches" not in n] == ["gamma"]
    assert model.ace.gamma.dtype == model.ace.duals.lambda_.dtype == torch.float32
    assert model(torch.randn(4, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_training_flag_and_override() -> None:
    model = attach(Layered())
    x = torch.randn(4, 3)
    feq = model.eval()(x)
    assert not torch.equal(model.train()(x), feq)
    with use_branches(model, True):
        assert not torch.equal(model.eval()(x), feq)
    with use_branches(model, False):
        assert torch.equal(model.train()(x), feq)
    always = attach(Layered(), eval_branches="on")
    with use_branches(always, False):
        feq = always.eval()(x)
    assert not torch.equal(always.eval()(x), feq)


def test_attach_to_a_model_in_eval_mode_keeps_it_there() -> None:
    model = attach(Layered().eval())
    assert not model.ace.training


class Choosy(Layered):
    def add_module(self, name: str, module: nn.Module | None) -> None:
        raise TypeError("only layers")


def test_a_container_with_another_way_to_add_modules() -> None:
    assert "ace" in attach(Choosy(), trace=False, tell=False)._modules


def test_forward_that_raises_leaves_no_forward_open() -> None:
    model = attach(Layered())
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 7)[:, :2].long())
    from ace_plugins.engine import forward as forwards

    assert forwards.OPEN.stack == []


def test_submodule_called_alone_explains_the_error() -> None:
    model = attach(Layered())
    with pytest.raises(AceError, match="'stem' reads the model's own input.*activation checkpointing"):
        model.layers[0](torch.randn(4, 8))
    assert attach(VectorMaps()).map_to_feat(torch.randn(2, 3, 4)).shape == (2, 3, 4)


@pytest.mark.parametrize("settings", [{}, {"loop": "paced", "frames": "on", "gamma_init": 1.0}], ids=["paper", "paced"])
def test_two_threads_do_not_mix(settings: dict[str, Any]) -> None:
    """As in nn.DataParallel: replicas share hook objects, run in threads, and have parameters of their own."""
    model = attach(Layered(), **settings)
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    for number, replica in enumerate(replicas):
        for name, module in model._modules.items():
            replica._modules[name] = module
        ace = model.ace._replicate_for_data_parallel()
        ace._parameters = {}
        ace.gamma = torch.full((3,), float(number))
        replica._modules["ace"] = ace
    x, outputs = torch.randn(4, 3), [None, None]

    def work(number: int) -> None:
        for _ in range(50):
            outputs[number] = replicas[number](x)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    with use_branches(model, False):
        assert torch.equal(outputs[0], model(x))
    with torch.no_grad():
        assert torch.equal(outputs[1], model(x))


def test_replaced_submodules_get_their_branch_too() -> None:
    model = attach(Layered())
    x = torch.randn(2, 3)
    model.layers[1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model(x)
    model.ace.gamma.grad = None
    model(x).sum().backward()
    assert (model.ace.gamma.grad != 0).all()
    del model.layers[2]
    model.ace.hooks.verified = False
    with pytest.raises(AceError, match=r"site 'layers.2': layers.2 is gone from Layered"):
        model(x)


def test_a_copied_layer_brings_no_branch() -> None:
    model = attach(VectorMaps())
    x = torch.randn(5, 3, 4)
    model(x)
    model.map_to_feat = copy.deepcopy(model.map_to_feat)
    model(x)  # notices that a site did not fire
    model.zero_grad()
    model(x).sum().backward()
    assert (model.ace.gamma.grad != 0).all()
    with use_branches(model, False):
        plain = model(x)
    with torch.no_grad():
        model.ace.gamma.zero_()
    assert torch.equal(model(x), plain)


def test_a_layer_copied_out_of_an_attached_model_is_a_plain_layer() -> None:
    model, plain = attach(Layered()), Layered()
    plain.layers = copy.deepcopy(model.layers)
    with use_branches(model, False):
        expected = model.layers[0](torch.ones(1, 8))
    assert torch.equal(plain.layers[0](torch.ones(1, 8)), expected)
    plain(torch.randn(2, 3))


def test_no_hooks_on_the_sites_while_f_eq_is_evaluated() -> None:
    def hooked(model: nn.Module) -> int:
        return sum(bool(layer._forward_hooks) for layer in model.layers)

    model = attach(Layered())
    assert hooked(model) == 3
    assert hooked(model.eval()) == 0
    with use_branches(model, True):
        assert hooked(model) == 3
    assert hooked(model) == 0
    twin = copy.deepcopy(model)
    assert hooked(twin.train()) == 0, "a copy does not know its model yet"
    x = torch.randn(2, 3)
    assert torch.equal(twin(x), model.train()(x))
    assert hooked(twin) == hooked(model) == 3
    twin.eval()
    assert torch.equal(twin(x), model.eval()(x))


def test_copies_name_their_own_model() -> None:
    model = attach(Layered())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(2, 3))
        assert twin.ace.root is twin
    assert model.ace.root is model
    project(model)
    with pytest.raises(AceError, match="Layered has no ACE attached"):
        project(model)
    assert status(twin).mode == "strict"


def test_project_inside_use_branches_leaves_no_hook() -> None:
    model = attach(Layered())
    ace = model.ace
    with use_branches(model, False):
        project(model)
    ace.train()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model(torch.randn(2, 3))


def test_a_copy_made_inside_use_branches_is_free_of_it() -> None:
    model = attach(Layered())
    with use_branches(model, False):
        twin = copy.deepcopy(model)
    x = torch.randn(2, 3)
    assert torch.equal(twin.train()(x), model.train()(x))


def test_an_interrupted_forward_is_forgotten() -> None:
    from ace_plugins.engine import forward as forwards

    model = attach(Layered())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_pre_hook(interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 3))
    handle.remove()
    assert len(forwards.OPEN.stack) == 1
    model(torch.randn(2, 3))
    assert forwards.OPEN.stack == []


def test_wrappers_are_seen_through() -> None:
    model = attach(Layered())
    for wrapper in (nn.DataParallel(model), torch.optim.swa_utils.AveragedModel(model)):
        assert status(wrapper).mode == "strict"
        assert equivariance_error(wrapper, (torch.randn(4, 3),)).relative < 1e-5
        with use_branches(wrapper, False):
            pass
        with pytest.raises(AceError, match="has no ACE attached.*pass the model inside the wrapper"):
            project(wrapper)
    assert status(nn.Sequential(nn.Linear(2, 2))).mode == "off"


def test_half_precision_reaches_the_branches_only() -> None:
    model = attach(Layered()).half()
    assert model.ace.branch("stem")[0].weight.dtype == torch.float16
    assert {t.dtype for t in (model.ace.gamma, model.ace.duals.lambda_, model.ace.duals.steps)} == {torch.float32}
    assert model.double().ace.gamma.dtype == torch.float64


def test_equivariance_error_of_both_models() -> None:
    model, x = attach(Layered()), torch.randn(8, 3)
    assert equivariance_error(model, (x,)).relative < 1e-5
    assert equivariance_error(model, (x,), branches_on=True).relative > 1e-3
    assert equivariance_error(project(model), (x,), samples=2).samples == 2


# What is refused, in which words, and that nothing is changed by it.


def refused(match: str, model: Any, adapter: str | None = None, **config: Any) -> None:
    before = dict(model.__dict__) if isinstance(model, nn.Module) else None
    hooks = [len(m._forward_hooks) for m in model.modules()] if isinstance(model, nn.Module) else None
    state = torch.random.get_rng_state()
    with pytest.raises(AceError, match=match) as caught:
        attach(model, adapter, **config)
    assert "\n" not in str(caught.value)
    if before is not None:
        assert model.__dict__.keys() == before.keys()
        assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(state, torch.random.get_rng_state())


def test_refusals() -> None:
    refused("unknown adapter 'layred': .*did you mean 'layered'", Layered(), "layred")
    modes = "auto, bounded, off, resilient, scheduled, strict"
    refused(f"unknown mode 'strct': expected one of {modes}", Layered(), mode="strct")
    refused("unknown setting 'dual_rate': did you mean 'dual_lr'", Layered(), dual_rate=1.0)
    refused("unknown preset 'papr'", Layered(), preset="papr")
    refused(
        r"no adapter supports the class torch.nn.modules.linear:Linear; installed adapters: .*layered", nn.Linear(2, 2)
    )
    refused("expected a torch.nn.Module to attach ACE to, found int", 3)
    refused("already attached to this Layered", attach(Layered()))
    for value in (-1.0, float("nan"), float("inf"), "fast", True):
        refused("dual_lr .*: expected a .*number", Layered(), dual_lr=value)
    for value in (-0.1, float("nan"), float("inf"), "1"):
        refused(r"gamma_lr .*: expected a finite number of at least 0", Layered(), gamma_lr=value)
    taken = Layered()
    taken.ace = nn.Identity()
    refused("toy:Layered already has an attribute 'ace'", taken)
    refused("adapter 'layered' finds no site in toy:Layered: ace_layers returned 1 nodes", Layered(layers=0))


class Odd(Adapter):
    model = Pair
    nodes: Sequence[Node] = ()

    @hookimpl
    def ace_layers(self) -> Sequence[Node]:
        return self.nodes


@contextmanager
def odd_adapter(nodes: Sequence[Node]) -> Iterator[None]:
    odd = Odd()
    odd.nodes = nodes
    registry().add(odd, "odd")
    try:
        yield
    finally:
        registry().remove("odd")


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([], "finds no site in toy:Pair: ace_layers returned 0 nodes, expected at least one Site"),
        ([Site("a", "mux", (1,), (1,))], "site 'a' names submodule 'mux', which does not exist"),
        ([Site("a", "mix", (1,), (1,), reads="b")], "'a' reads 'b', which is not an earlier stem"),
        ([Site("a", "mix", (1,), (1,), reads=Tap("y"))], r"argument 'y' of a forward pass with arguments \(input\)"),
        ([Site("a", "mix", (1,), (1,), reads=Tap(3))], r"argument 3 of a forward pass with arguments \(input\)"),
        ([Site("a.b", "mix", (1,), (1,)), Site("a_b", "mix", (1,), (1,))], "'a.b' and 'a_b' count as one name"),
        (
            [Site("a", "mix", (1,), (1,)), Site("b", "mix", (1,), (1,))],
            "sites 'a' and 'b' name the same submodule",
        ),
        (
            [Site("a", "mix", (1,), (1,), through="s")],
            "'a' goes through 's', which is not an earlier stem with reads=None",
        ),
        (
            [Stem("s", Tap(0, "mix"), (1,), (1,)), Site("a", "mix", (1,), (1,), through="s")],
            "'a' goes through 's', which is not an earlier stem with reads=None",
        ),
        (
            [Stem("s", None, (1,), (2,)), Site("a", "mix", (1,), (1,), through="s")],
            r"'a' has shape_in \(1,\) but goes through 's' of shape_out \(2,\)",
        ),
        (
            [Stem("s", None, (1,), (1,)), Site("a", "mix", (1,), (1,), reads="s")],
            "'a' reads 's', which has reads=None; set through=",
        ),
        ([Stem("s", Tap(), (1,), (1,)), Site("a", "mix", (1,), (1,))], "stem 's' reads a Tap without a module"),
    ],
)
def test_adapters_that_do_not_fit(nodes: Sequence[Node], match: str) -> None:
    with odd_adapter(nodes):
        refused(match, Pair(4))


def test_branch_of_the_wrong_shape_is_named() -> None:
    with odd_adapter([Site("mix", "mix", (4,), (3,))]):
        model = attach(Pair(4))
        with pytest.raises(AceError, match=r"site 'mix': its branch returns shape \(2, 3\), expected \(2, 4\)"):
            model(torch.randn(2, 3), torch.randn(2, 4))
        with pytest.raises(AdapterCheckError, match=r"adapter 'odd' fails \d+ of \d+ checks:\n  \w+"):
            check_adapter("odd")


def test_features_of_another_shape_are_named() -> None:
    with odd_adapter([Site("mix", "mix", (5,), (4,))]):
        model = attach(Pair(4))
        with pytest.raises(AceError, match=r"'mix' reads features of shape \(4,\) .*expected shape_in \(5,\)"):
            model(torch.randn(2, 3), torch.randn(2, 4))


def test_a_hook_that_fails_is_named() -> None:
    class Failing(Odd):
        @hookimpl
        def ace_layers(self) -> Sequence[Node]:
            raise KeyError("blocks")

        @hookimpl
        def ace_example(self) -> Any:
            return (Pair(4), ())

    registry().add(Failing(), "odd")
    try:
        refused("adapter 'odd' .*: ace_layers failed: KeyError: 'blocks'", Pair(4))
        with pytest.raises(AdapterCheckError) as caught:
            check_adapter("odd")
        lines = str(caught.value).splitlines()
        assert len(lines) == 2, "one cause is told once"
        assert "ace_example returned tuple (Pair(" in lines[1]
    finally:
        registry().remove("odd")


def test_a_batch_that_is_no_call_is_explained() -> None:
    with pytest.raises(AceError, match=r"batch does not fit TwoOutputs.forward\(x, h\): .*pass a tuple"):
        equivariance_error(attach(TwoOutputs()), torch.randn(2, 3))


def test_status_reads_well() -> None:
    text = str(status(attach(Layered())))
    assert text.splitlines()[0].startswith("ACE strict (layered), 0 steps, ")
    assert text.splitlines()[1].split() == ["site", "gamma", "lambda"]
    assert text.splitlines()[2].split() == ["layers.0", "1", "0"]
    assert str(status(Layered())).startswith("no ACE: ")


def test_project_warns_where_the_branches_are_deployed() -> None:
    with pytest.warns(AceWarning, match=r"removes ACE from Layered .*max \|gamma\| is 1 and mode 'resilient'"):
        project(attach(Layered(), mode="resilient"))
    project(attach(Layered()))
