"""`save_pretrained` of models that hold a sharded one and know nothing of it.

Their own would write this rank's parts, or fail on them when the folder is begun. So while there is a sharded model,
the method of the library's class looks whether the model that is saved holds one; others are saved as ever.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext, context_of, division_of, nearest_context
from shardcore.nn.handlers import Undo
from shardcore.nn.process import Change

#: On a method that was put into a class of others: the one whose place it takes.
STANDS_FOR = "_shardcore_stands_for"


def let_save(module: str, name: str, save: Callable[..., None]) -> Undo | None:
    """Let models of a class that hold a sharded one save it; None while nobody has imported the class."""
    if module not in sys.modules:
        return None
    cls: Any = getattr(sys.modules[module], name)
    native = vars(cls)["save_pretrained"]

    @functools.wraps(native)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        context = _context_inside(self)
        if context is None:
            native(self, *args, **kwargs)
        else:
            save(self, context, functools.partial(native, self), *args, **kwargs)

    setattr(save_pretrained, STANDS_FOR, native)
    cls.save_pretrained = save_pretrained

    def undo() -> None:
        if vars(cls)["save_pretrained"] is save_pretrained:  # else somebody has replaced it since
            cls.save_pretrained = native

    return undo


def _context_inside(model: nn.Module) -> ShardContext | None:
    """Return the context of the sharded models that ``model`` holds; None if there are none, or it is sharded itself.

    Raises:
        NotSupportedError: no rank can save them all.
    """
    if nearest_context(model) is not None:
        return None
    held = {module: context for module in model.modules() if (context := context_of(module)) is not None}
    name = type(model).__name__
    if divided := [type(module).__name__ for module in held if division_of(module) is not None]:
        raise NotSupportedError(
            f"save_pretrained of a {name} that holds a {divided[0]} which is divided among the ranks of a pipeline is "
            "not supported: no rank has all of it. Use shardcore.save_checkpoint(folder, part), and then the command "
            "'shardcore convert folder model' for that part"
        )
    ranks = {tuple(context.mesh.mesh.flatten().tolist()) for context in held.values()}
    if len(ranks) > 1:
        raise NotSupportedError(
            f"save_pretrained of a {name} that holds sharded models of other ranks each ({sorted(ranks)}) is not "
            "supported: shard them over the same ranks, or save each by itself"
        )
    return next(iter(held.values()), None)


def _save_whole(model: Any, *rest: Any, **kwargs: Any) -> None:
    from shardcore_transformers._saving import save_pretrained

    save_pretrained(model, *rest, **kwargs)


#: See `shardcore.clients`.
CHANGES: tuple[Change, ...] = (
    functools.partial(let_save, "transformers.modeling_utils", "PreTrainedModel", _save_whole),
)
