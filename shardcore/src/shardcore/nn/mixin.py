"""The class of a sharded module: its native class, and before it an ordered list of mixins.

A module that becomes parallel stays the same object. It gets one generated class, a subclass of its native class, whose
bases are what it does beyond the native one: *mixins*, outermost first. Each calls ``super().forward`` for what is
inside of it, and the last of them the native forward. `mixins` lists them; a traceback names each by its class.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])

# In the namespace of a generated class: what it was generated from.
_NATIVE = "_shardcore_native"
_MIXINS = "_shardcore_mixins"


def once(function: Function) -> Function:
    """Cache the class or function that ``function`` makes of its arguments, as long as it is in use.

    The arguments are classes of users. One that is made anew for each trial of a search, and dropped with its model,
    has to be freed, so the cache keeps neither arguments nor results alive.
    """
    made: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

    @functools.wraps(function)
    def remembered(*arguments: Any) -> Any:
        # The result holds its arguments, so that their ids are nobody else's as long as it is known here.
        key = _identity(arguments)
        result = made.get(key)
        if result is None:
            result = made[key] = function(*arguments)
        return result

    return remembered  # type: ignore[return-value]  # same arguments, same result


def _identity(value: Any) -> Hashable:
    if isinstance(value, tuple):
        return tuple(map(_identity, value))
    return value if isinstance(value, str) else id(value)


def mixins(module: nn.Module | type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the mixins of a module of a sharded model, outermost first; () if it has its native class alone."""
    cls = module if isinstance(module, type) else type(module)
    found: list[type[nn.Module]] = []
    for base in cls.__mro__:
        if _MIXINS in vars(base):
            return (*found, *vars(base)[_MIXINS], *mixins(vars(base)[_NATIVE]))
    return _itself(cls)


def native_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that modules of ``cls`` had before they got mixins."""
    for base in cls.__mro__:
        if _NATIVE in vars(base):
            return native_class(vars(base)[_NATIVE])
        if "forward" in vars(base) or "__call__" in vars(base):
            break
    return cls


def add_mixin(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put ``mixin`` around what ``module`` does already; nothing changes if it has it."""
    cls = type(module)
    if issubclass(cls, mixin):
        return
    if _MIXINS in vars(cls):
        module.__class__ = sharded_class(vars(cls)[_NATIVE], (mixin, *vars(cls)[_MIXINS]))
    else:
        # A class that others have put on top of ours (FSDP2, a user's) is native to what comes after it.
        module.__class__ = sharded_class(_below(cls), (mixin, *_itself(cls)))


def _itself(cls: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return ``cls`` if it is a mixin that is complete without a generated class, such as `VocabEmbedding`."""
    return (cls,) if _below(cls) is not cls else ()


def _below(cls: type[nn.Module]) -> type[nn.Module]:
    if hasattr(cls, _MIXINS) or not hasattr(cls, "keeps_name"):
        return cls
    return next(base for base in cls.__mro__ if "forward" in vars(base) and not hasattr(base, "keeps_name"))


@once
def sharded_class(native: type[nn.Module], own: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    """Return the subclass of ``native`` with the mixins ``own``, outermost first.

    One that serves ``super().forward`` comes after a native class with more to it, which runs around it.

    There is one for each combination, which instances share. It has the name of the native class, since libraries go by
    class names, unless a mixin replaces what the native class does (``keeps_name``).
    """
    if len(own) == 1 and issubclass(own[0], native):
        return own[0]
    named: Any = next((mixin for mixin in own if not mixin.keeps_name), native)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {
        "__module__": named.__module__,
        "__qualname__": named.__qualname__,
        "__doc__": named.__doc__,
        _NATIVE: native,
        _MIXINS: own,
    }
    inside = tuple(b for b in own if vars(b).get("plan_serves_super", False) and not issubclass(b, native))
    made = type(named.__name__, (*(b for b in own if b not in inside), native, *inside), namespace)
    around = [mixin for mixin in own if mixin.forward is not nn.Module.forward]
    if named is native and around:
        replaced = [mixin.forward for mixin in around if getattr(mixin, "replaces_forward", False)]
        _sign(made, [*replaced, native.forward][0])
    return made


def _sign(made: Any, native: Callable[..., Any]) -> None:
    """Give a generated class the signature of ``native``: libraries look there for the arguments that a model takes.

    Its forward is a copy of the first one in the order of resolution, so that no call goes through one frame more;
    unless a library has put one into each subclass of its own, and knows it by identity.
    """
    forward = vars(made).get("forward")
    if forward is None:
        first = next(vars(base)["forward"] for base in made.__mro__ if "forward" in vars(base))
        forward = types.FunctionType(
            first.__code__, first.__globals__, "forward", first.__defaults__, first.__closure__
        )
        forward.__kwdefaults__ = first.__kwdefaults__
        forward.__dict__.update(first.__dict__)
    made.forward = functools.update_wrapper(forward, native)


def is_generated(cls: type[nn.Module]) -> bool:
    """Tell whether ``cls`` itself was generated from mixins, not derived from such a class."""
    return _MIXINS in vars(cls)


def name_in_tracebacks(mixin: type[nn.Module]) -> None:
    """Give the functions that run a mixin its name: tracebacks show functions, and all would be ``forward``."""
    if hasattr(mixin, _MIXINS):
        return  # a generated class, or one that somebody derived from it
    for name in ("__call__", "forward"):
        function = vars(mixin).get(name)
        # Only what was written for it: a function that it has from elsewhere keeps its name there.
        if inspect.isfunction(function) and function.__qualname__ == f"{mixin.__qualname__}.{name}":
            function.__code__ = function.__code__.replace(co_name=f"{mixin.__name__}.{name}")
