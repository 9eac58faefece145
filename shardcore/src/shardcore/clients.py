"""What libraries are to the core: found through entry points of ``shardcore.clients``, known by none of its code.

An entry point has the name by which the library is imported, and names a module. Of that is used what it has:

``attached_to(model)``
    what the library has put around the layers of a model, an `Attached` or None; asked by `shardcore.shard` where the
    model has modules or parameters of the library
``unpacking(model)``
    likewise what makes modules with quantized weights divisible ones, a `shardcore.plan.shard_plan.ModelPhase` or None
``CHANGES``
    what is changed in the library as long as a sharded model lives; see `shardcore.nn.process.Change`
``needs_of_optimizer(optimizer)``, ``OPTIMIZERS_AT_WHOLES``
    which of `shardcore_loop` has to step an optimizer of the library, or None, and the option that needs it; and
    the names of its classes that look at more than single elements
``captured()``
    the lists in which the library keeps, in the forward that is running, what hooks have seen inside of blocks
``CONTEXT``
    how the attention of its models is divided over ``cp``: a `shardcore.nn.context.shard.DividedAttention`
``INSTEAD_OF_CHANGING``
    what to do instead of putting modules of the library into a sharded model, in words
``POLICY``
    the class that policies for models of the library derive from; a policy that is given as data does too
``from_pretrained(...)``
    loads a checkpoint of the library into a sharded model, for `shardcore.from_pretrained`
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

from importlib_metadata import EntryPoint, entry_points
from torch import nn

from shardcore.errors import ConfigError
from shardcore.mesh.context import ShardContext
from shardcore.nn import libraries
from shardcore.nn.process import Change
from shardcore.plan.shard_plan import ModelPhase
from shardcore.plugins.isolation import attempt, in_one_line
from shardcore.policy import Policy

__all__ = [
    "GROUP",
    "Attached",
    "attached_to",
    "changes_of_libraries",
    "client_of",
    "loader_of",
    "policy_base",
    "unpacking",
]

#: The group of entry points that name clients.
GROUP = "shardcore.clients"


class Attached(ModelPhase):
    """What a library has around the layers of a model (adapters), between the call of `shard` and its end.

    A policy names the modules of the class that it serves. `begin` leaves these alone in the model, and `give_up`
    undoes that. `apply` puts back what was taken off: on the sharded model, or as it was where nothing was sharded.

    Attributes:
        model: what is sharded: the model without what is attached.
        receive: gives a module the values of one rank; None where those of the ranks have to be equal. `shard` sets it.
    """

    model: nn.Module
    receive: Callable[[nn.Module], None] | None = None

    def runs(self, context: ShardContext | None) -> bool:
        """Also where nothing was sharded: it is put back."""
        return True


@functools.cache
def _offered() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def client_of(library: str) -> ModuleType | None:
    """Return the module of the client for a library, None if none is installed.

    Raises:
        ConfigError: it cannot be imported, or several distributions have one.
    """
    if not (entries := _offered().get(library)):
        return None
    homes = " and ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in entries))
    if len(entries) > 1:
        raise ConfigError(f"{homes} each have a client for {library}; leave one of them installed")
    try:
        return cast("ModuleType", attempt(entries[0].load, f"importing {entries[0].value}"))
    except Exception as error:
        raise ConfigError(f"{homes}, the client for {library}, cannot be imported: {in_one_line(error)}") from error


def loader_of(model_class: type[Any] | str) -> Callable[..., Any] | None:
    """Return the `from_pretrained` of a client: of the library of a class or its bases, else of any that has one.

    Raises:
        ConfigError: no other has one, and a client cannot be imported.
    """
    names = (
        [model_class] if isinstance(model_class, str) else [c.__module__ for c in getattr(model_class, "__mro__", ())]
    )
    libraries = [name.partition(".")[0] for name in names]
    others = sorted(_offered(), key=lambda library: (library not in sys.modules, library))
    broken = None
    for library in dict.fromkeys([*libraries, *others]):
        try:
            load = getattr(client_of(library), "from_pretrained", None)
        except ConfigError as error:
            broken = broken or error
            continue
        if load is not None:
            return cast("Callable[..., Any]", load)
    if broken is not None:
        raise broken
    return None


def policy_base(model: nn.Module) -> type[Policy]:
    """Return the class that policies for models of the library of ``model``, or of its bases, derive from."""
    for library in dict.fromkeys(cls.__module__.partition(".")[0] for cls in type(model).__mro__):
        if (base := getattr(client_of(library), "POLICY", None)) is not None:
            return cast("type[Policy]", base)
    return Policy


def attached_to(model: nn.Module) -> Attached | None:
    """Return what a library has attached to ``model`` whose client is installed, or None.

    Raises:
        NotSupportedError: it is nothing that can be sharded.
    """
    return next(_asked("attached_to", model), None)


def unpacking(model: nn.Module) -> list[ModelPhase]:
    """Return what makes the quantized modules of ``model`` divisible ones, of libraries whose clients are installed."""
    return list(_asked("unpacking", model))


def _asked(what: str, model: nn.Module) -> Iterator[Any]:
    held = itertools.chain(model.modules(), model.parameters())
    for library in dict.fromkeys(type(each).__module__.partition(".")[0] for each in held):
        ask = getattr(client_of(library), what, None)
        if ask is not None and (found := ask(model)) is not None:
            yield found


def _answer(library: str, what: str) -> Any:
    if library:
        return getattr(client_of(library), what, None)
    imported = (each for each in _offered() if each in sys.modules)
    return [said for each in imported if (said := getattr(client_of(each), what, None)) is not None]


libraries.answered_by(_answer)


def changes_of_libraries() -> tuple[Change, ...]:
    """Return what is changed in the libraries that are imported here as long as a sharded model lives."""
    clients = [client_of(library) for library in _offered() if library in sys.modules]
    return tuple(change for client in clients for change in getattr(client, "CHANGES", ()))
