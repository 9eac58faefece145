"""Handlers of single operations on DTensors, in torch's table of them; other operations are none the slower.

They act for the whole process, on every DTensor. Where torch has no such table, nothing is handled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.tensor import DTensor

from shardcore._private import missing

__all__ = ["Handler", "handle", "natively"]

#: Called with the operation, its arguments and its keyword arguments, in the place of torch's own dispatch.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def handle(operations: Iterable[Any], handler: Handler, feature: str) -> None:
    """Let ``handler`` do these operations, unless torch lacks what ``feature`` needs or something else does them."""
    if not missing(feature):
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        for operation in operations:
            handlers.setdefault(operation, handler)


def natively(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what torch does without a handler.

    A handler cannot decline: while torch works, it is not there, for no other thread either.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation, None)
    try:
        return operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler
