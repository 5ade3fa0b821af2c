"""Removes ACE at the end of MACE's own training, so that the files it writes load in plain MACE.

After the last epoch ``mace_run_train`` loads its best checkpoint, pickles the whole model (``.model``) and compiles it
(``_compiled.model``). In strict and scheduled mode ACE is removed before these files are written. In modes that deploy
the branches the model keeps them, and a message explains what that means for the files.
"""

from __future__ import annotations

from typing import Any

import wrapt

import ace_plugins
from ace_plugins import adapter as ace


def install(model: Any) -> None:
    """Wrap MACE's training loop in this process, unless it is wrapped, if this adapter has attached the model."""
    if ace_plugins.status(model).adapter != "mace":
        return
    from mace import tools

    if not getattr(tools.train, "_self_finishes", False):
        wrapt.wrap_function_wrapper(tools, "train", _train)
        tools.train._self_finishes = True


def _train(train: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = train(*args, **kwargs)
    finish(kwargs["model"] if "model" in kwargs else args[0])
    return result


def finish(model: Any) -> None:
    """Remove ACE from a trained model; if its mode keeps the branches, print what that means for MACE's files."""
    now = ace_plugins.status(model)
    if not now.sites:
        return
    if not now.branches_in_eval:
        ace_plugins.project(model)
        ace.say("training has finished: ACE is removed, and the models that MACE writes now are plain MACE")
        return
    ace.say(
        f"training has finished, and mode {now.mode} deploys the branches: the .model that MACE writes now only loads "
        "where ace-plugins is installed, and no _compiled.model is written, since TorchScript does not support them; "
        "'ace-patch export X.model --trust -o plain.model' writes the model without them"
    )
