"""Handlers of single operations on DTensors, in torch's table of them; other operations are none the slower.

The table is that of the process: a handler sees every DTensor, and leaves those which are not of a sharded model to
torch (`shardcore.nn.living`). Where torch has no such table, nothing is handled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardcore._private import missing

#: Called with the operation, its arguments and its keyword arguments, in the place of torch's own dispatch.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: Takes a change of torch back.
Undo = Callable[[], None]


#: What did the operations that are handled here: torch has handlers of its own.
_BEFORE: dict[Any, Handler] = {}


def overloads(*names: str) -> list[Any]:
    """Return all forms of operations of torch."""
    found = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(operation, form) for operation in found for form in operation.overloads()]


def handle(operations: Sequence[Any], handler: Handler, feature: str) -> Undo:
    """Let ``handler`` do these operations, unless torch lacks what ``feature`` needs."""
    if missing(feature):
        return lambda: None
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    _BEFORE.update({operation: handlers[operation] for operation in operations if operation in handlers})
    handlers.update(dict.fromkeys(operations, handler))

    def undo() -> None:
        for operation in operations:
            if handlers.get(operation) is handler:
                del handlers[operation]
                if operation in _BEFORE:
                    handlers[operation] = _BEFORE.pop(operation)

    return undo


def natively(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch does without a handler.

    A handler cannot decline: while torch works, it is not there, for no other thread either.
    """
    if before := _BEFORE.get(operation):
        return before(operation, args, kwargs)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation, None)
    try:
        return operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler
