"""The end of MACE's own training: what it writes from here on is to load in plain MACE.

After the last epoch ``mace_run_train`` loads its best checkpoint, pickles the model whole (``.model``) and compiles it
(``_compiled.model``). In strict mode ACE has done its work by then and is taken off. Where the branches are deployed
the model keeps them, and people are told what that means for the files.
"""

from __future__ import annotations

from typing import Any

import wrapt

import ace_plugins
from ace_plugins import adapter as ace


def install() -> None:
    """Have the training loop of this process tell when it is over, once."""
    from mace import tools

    if not getattr(tools.train, "_self_tells", False):
        wrapt.wrap_function_wrapper(tools, "train", _train)
        tools.train._self_tells = True


def _train(train: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrapper of the training loop: changes nothing but what comes after it."""
    result = train(*args, **kwargs)
    finish(kwargs["model"] if "model" in kwargs else args[0])
    return result


def finish(model: Any) -> None:
    """Training is over: plain MACE from here on, or a line on what keeps the branches."""
    state = getattr(model, "ace", None)
    if state is None:
        return
    if not state.config.branches_in_eval:
        ace_plugins.project(model)
        ace.say("training is over: ACE is taken off, and the models that MACE writes now are plain MACE")
        return
    ace.say(
        f"training is over, and mode {state.config.mode} deploys the branches: the .model that MACE writes now loads "
        "only where ace-plugins is installed, and no _compiled.model is written, since TorchScript cannot hold them; "
        "'ace-patch export X.model --trust -o plain.model' writes it without them"
    )
