"""What attaching leaves alone: the random stream, upstream's weights, and upstream itself where gamma is 0."""

from __future__ import annotations

import copy

import torch

from ...engine.measuring import use_branches
from ...patch.constructors import attach
from ..kit import CheckError, Kit, different, differing_site, layout, same


def check_attach_moves_no_random_numbers(kit: Kit) -> None:
    """A script that sets its seed draws the same numbers with ACE and without."""
    example = kit.example()
    torch.manual_seed(kit.seed)
    for mode in ("off", "strict"):
        before = torch.random.get_rng_state()
        attach(example.model, kit.plugin.name, trace=False, tell=False, mode=mode)
        if not torch.equal(before, torch.random.get_rng_state()):
            raise CheckError(
                f"attach moves the random stream (mode {mode})",
                "whatever draws random numbers in ace_preset, ace_shims, ace_layers, ace_group_action or ace_script",
            )


def check_attach_leaves_the_weights(kit: Kit) -> None:
    """Upstream's parameters and buffers are the same objects with the same values, and it has no others."""
    example = kit.example()
    held = {name: id(parameter) for name, parameter in example.model.named_parameters()}
    before = copy.deepcopy(example.model.state_dict())
    attach(example.model, kit.plugin.name, trace=False, tell=False)
    after = {name: value for name, value in example.model.state_dict().items() if not name.startswith("ace.")}
    changed = different(before, after)
    if changed:
        raise CheckError(f"attach changes upstream's {', '.join(changed[:3])}", "ace_layers and ace_branch")
    new = [name for name in after if name not in before]
    if new:
        raise CheckError(f"attach adds {', '.join(new[:3])} to upstream", "ace_branch: return the module, no more")
    now = {name: id(parameter) for name, parameter in example.model.named_parameters()}
    replaced = [name for name, which in held.items() if now.get(name) != which]
    if replaced:
        raise CheckError(f"attach replaces upstream's {', '.join(replaced[:3])}", "ace_layers and ace_branch")


def check_attach_repeats(kit: Kit) -> None:
    """The same seed gives the same branches."""
    one, two = (kit.attached()[0] for _ in range(2))
    others = different(one.ace.branches.state_dict(), two.ace.branches.state_dict())
    if others:
        raise CheckError(
            f"the same seed gives other branches: {', '.join(others[:3])}",
            "ace_branch: draw from torch's own random stream",
        )


def check_branches_are_their_own(kit: Kit) -> None:
    """No branch holds a parameter of upstream or of another branch: each gamma is to scale one thing."""
    model, _ = kit.attached()
    upstream = {id(p): name for name, p in model.named_parameters() if not name.startswith("ace.")}
    seen: dict[int, str] = {}
    for node in model.ace.nodes.values():
        for name, parameter in model.ace.branch(node.name).named_parameters():
            owner = upstream.get(id(parameter)) or seen.get(id(parameter))
            if owner is not None:
                raise CheckError(
                    f"the branch of {node.name!r} holds {owner} as its {name}", f"ace_branch, site {node.name!r}"
                )
            seen[id(parameter)] = f"the branch of {node.name!r}"


def check_gamma_zero_is_upstream(kit: Kit) -> None:
    """With gamma = 0 the model is upstream bit for bit, in training and in evaluation."""
    plain = kit.example()
    model, example = kit.attached()
    with torch.no_grad():
        model.ace.gamma.zero_()
    for training in (True, False):
        sides = (plain.model.train(training), plain), (model.train(training), example)
        with use_branches(model, True):
            outputs = [kit.run(*side) for side in sides]
            if not same(*outputs):
                where = differing_site(kit, model.ace.sites, *sides)
                raise CheckError(
                    f"gamma = 0 does not give upstream's output bit for bit (training={training}){where}",
                    "ace_branch: a branch that writes into what it reads, or gives values that are not finite; "
                    "ace_layers: changes to the model",
                )


def check_eval_is_upstream(kit: Kit) -> None:
    """Strict mode: the script's own validation sees f_eq."""
    plain = kit.example()
    model, example = kit.attached(mode="strict")
    sides = (plain.model.eval(), plain), (model.eval(), example)
    if not same(*(kit.run(*side) for side in sides)):
        where = differing_site(kit, model.ace.sites, *sides)
        raise CheckError(
            f"strict: model.eval() does not give upstream's output{where}",
            "ace_layers and ace_branch: what they change in the model",
        )


def check_eval_keeps_the_branches(kit: Kit) -> None:
    """Resilient mode: the branches are part of what is deployed, and so of the validation."""
    plain = kit.example()
    model, example = kit.attached(mode="resilient", spectral_norm=True, gamma_init=1.0)
    if same(kit.run(plain.model.eval(), plain), kit.run(model.eval(), example)):
        raise CheckError(
            "resilient: model.eval() is upstream's output: no branch has an effect",
            "ace_layers, module and output of the sites; ace_branch",
        )


def check_off_is_upstream(kit: Kit) -> None:
    """Mode off: the same losses, keys and shapes."""
    plain, off = kit.example(), kit.example()
    torch.manual_seed(kit.seed)
    expected = kit.train(plain.model, plain)
    torch.manual_seed(kit.seed)
    attach(off.model, kit.plugin.name, mode="off")
    losses = kit.train(off.model, off)
    if losses != expected:
        raise CheckError(
            f"mode off trains with losses {losses}, upstream with {expected}", "ace_shims and ace_preset: what they do"
        )
    if layout(off.model.state_dict()) != layout(plain.model.state_dict()):
        raise CheckError("mode off changes the keys or shapes of the state_dict", "ace_shims")
