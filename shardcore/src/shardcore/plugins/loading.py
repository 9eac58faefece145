"""Load packs: one entry point after the other, each in isolation, in an order that is the same on every rank.

The loader is our own because pluggy's passes over duplicate names in silence, takes the order of the file system, and
stops at the first plugin that fails. Imports no torch.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import importlib_metadata
import pluggy
from packaging.utils import canonicalize_name

from shardcore import _env, hooks
from shardcore.errors import PackError
from shardcore.hooks import API_VERSION, ParallelModuleSpec, PolicySpec, is_reference
from shardcore.plugins.isolation import attempt, in_one_line

#: The entry-point group in which packs announce themselves.
GROUP = "shardcore.packs"

_UNKNOWN = "unknown"

_FILE = "entry_points.txt"

_OBSERVERS = ("shardcore_before_shard", "shardcore_after_shard")

Offer = TypeVar("Offer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """An installed pack and what became of it.

    Attributes:
        name: the name of its entry point, such as `llama`.
        distribution: the distribution that brought it, such as `shard-llama`.
        version: the version of that distribution.
        value: the value of its entry point, such as `shard_llama.plugin`.
        status: `loaded`; `blocked` by the environment; or `broken`, in which case `error` says why.
        error: what it raised.
        specs: what it serves; empty unless it is loaded, like all that follows.
        modules: what it brings in place of shardcore's own modules.
        cases: the functions that return tiny models for the conformance kit, as `module:callable`.
        observers: its implementations of the observing hooks, by the hook's name.
    """

    name: str
    distribution: str
    version: str
    value: str
    status: Literal["loaded", "blocked", "broken"]
    error: Exception | None = None
    specs: tuple[PolicySpec, ...] = ()
    modules: tuple[ParallelModuleSpec, ...] = ()
    cases: tuple[str, ...] = ()
    observers: Mapping[str, Callable[..., None]] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


def load_packs(entry_points: Iterable[importlib_metadata.EntryPoint] | None) -> list[Pack]:
    """Load every pack that the environment allows; one that fails is recorded as broken, or raises under strict."""
    allowed, denied, strict = _env.packs(), _env.disabled_packs(), _env.strict()
    plugins: list[tuple[object, Pack]] = []
    packs = []
    for entry_point, pack in _advertised(entry_points):
        if _is_among(pack, denied) or (allowed is not None and not _is_among(pack, allowed)):
            packs.append(replace(pack, status="blocked", error=None))
            continue
        packs.append(pack if entry_point is None else _load(entry_point, pack, plugins))
        if strict and packs[-1].error is not None:
            raise PackError(complaint(packs[-1])) from packs[-1].error
    return packs


class _Manager(pluggy.PluginManager):
    """A plugin manager that looks at hooks only, so that a plugin's lazy attributes are not all loaded."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith("shardcore_") else None


#: Its class has another name from release to release of importlib_metadata.
_Distribution = Any

#: Where to load a pack from; None if that cannot be read, and the pack is broken.
_Advertised = tuple[importlib_metadata.EntryPoint | None, Pack]


def _advertised(entry_points: Iterable[importlib_metadata.EntryPoint] | None) -> list[_Advertised]:
    """List what is installed, each once, in an order that does not depend on `sys.path`."""
    found = _installed() if entry_points is None else map(_pack_of, entry_points)
    unique: dict[tuple[str, str, str], _Advertised] = {}
    for entry, pack in found:
        unique.setdefault((pack.name, pack.value, pack.distribution), (entry, pack))
    return [unique[key] for key in sorted(unique)]


def _installed() -> Iterator[_Advertised]:
    """Yield the packs of every distribution, whatever is wrong with the metadata of others."""
    for distribution in importlib_metadata.distributions():
        try:
            if not distribution.entry_points.select(group=GROUP):
                continue
            name, _ = _origin(distribution)
            # Of two copies of one distribution, Python imports the one that comes first.
            first = distribution if name == _UNKNOWN else importlib_metadata.distribution(name)
            yield from map(_pack_of, first.entry_points.select(group=GROUP))
        except Exception as error:
            if _offers_packs(distribution, error):
                name, version = _origin(distribution)
                pack = Pack(name=name, distribution=name, version=version, value=_FILE, status="broken", error=error)
                yield None, pack


def _offers_packs(distribution: _Distribution, error: Exception) -> bool:
    """Tell whether entry points that cannot be read speak of packs; those of strangers are no concern of ours."""
    if isinstance(error, UnicodeDecodeError):
        return GROUP.encode() in error.object
    try:
        return GROUP in (distribution.read_text(_FILE) or "")
    except Exception:
        return False


def _pack_of(entry: importlib_metadata.EntryPoint) -> _Advertised:
    distribution, version = _origin(entry.dist)
    return entry, Pack(name=entry.name, distribution=distribution, version=version, value=entry.value, status="blocked")


def _origin(distribution: _Distribution | None) -> tuple[str, str]:
    """Return the name and the version of a distribution, as far as they can be read."""
    try:
        return (distribution.name or _UNKNOWN, distribution.version or _UNKNOWN) if distribution else (_UNKNOWN,) * 2
    except Exception:
        # Damaged metadata is no reason to lose a pack, or all the others with it.
        return (_UNKNOWN, _UNKNOWN)


def _is_among(pack: Pack, names: frozenset[str]) -> bool:
    """Whether a list from the environment names the pack: by name, distribution, or `distribution:name`."""
    own = {pack.name, pack.distribution, f"{pack.distribution}:{pack.name}"}
    return not {canonicalize_name(name) for name in own}.isdisjoint(map(canonicalize_name, names))


def _load(entry_point: importlib_metadata.EntryPoint, pack: Pack, plugins: list[tuple[object, Pack]]) -> Pack:
    """Load one pack, collect what it offers, and add its plugin to others; whatever it raises becomes its `error`."""
    try:
        # Filters that a plugin sets would decide what becomes of the warnings of everybody after it.
        with warnings.catch_warnings():
            plugin, offers = attempt(lambda: _offers_of(entry_point.load(), pack, plugins), pack.value)
    except Exception as error:
        return replace(pack, status="broken", error=error)
    loaded = replace(pack, status="loaded", **offers)
    plugins.append((plugin, loaded))
    return loaded


def _offers_of(plugin: object, pack: Pack, others: list[tuple[object, Pack]]) -> tuple[object, dict[str, Any]]:
    """Return the plugin, and the fields of the pack that its hooks fill.

    Each plugin has a manager of its own: in a call of all plugins one that raises would take the others with it, and
    one that was refused need not be taken back.
    """
    if twice := next((other for known, other in others if known is plugin), None):
        raise PackError(f"{pack.value} is already registered, as the pack {twice}; name it once")
    manager = _Manager(hooks.hookspec.project_name)
    manager.add_hookspecs(hooks)
    manager.register(plugin)
    manager.check_pending()
    own = {}
    for caller in manager.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            if implementation.hookwrapper or getattr(implementation, "wrapper", False):
                raise PackError(
                    f"{caller.name} is a wrapper, and each pack's hooks are called by themselves, so that there is "
                    "nothing to wrap; remove wrapper= from its hookimpl"
                )
            own[caller.name] = implementation
    if not own:
        raise PackError(f"{pack.value} implements no hook: wanted a function shardcore_*, marked with hookimpl")
    specs = _offered(own, "shardcore_policies", PolicySpec)
    modules = _offered(own, "shardcore_parallel_modules", ParallelModuleSpec)
    cases = _offered(own, "shardcore_conformance_cases", str)
    _check_api([*specs, *modules], pack)
    observers = {name: _with_known_arguments(own[name]) for name in _OBSERVERS if name in own}
    return plugin, {"specs": specs, "modules": modules, "cases": cases, "observers": observers}


def _offered(own: Mapping[str, pluggy.HookImpl], hook: str, kind: type[Offer]) -> tuple[Offer, ...]:
    """Return what one hook of a plugin returns; strings have to be references."""
    offered = own[hook].function() if hook in own else []
    fits: Callable[[object], bool] = is_reference if kind is str else lambda value: isinstance(value, kind)
    if not isinstance(offered, list) or not all(map(fits, offered)):
        wanted = "strings like 'module:callable'" if kind is str else kind.__name__
        raise PackError(f"{hook} returned {as_text(offered)}; wanted a list of {wanted}")
    return tuple(offered)


def _with_known_arguments(implementation: pluggy.HookImpl) -> Callable[..., None]:
    """Return the function of a hook, to be called with all arguments of the hook by name, whichever it takes."""

    def call(**arguments: object) -> None:
        implementation.function(*(arguments[name] for name in implementation.argnames))

    return call


def _check_api(specs: Iterable[PolicySpec | ParallelModuleSpec], pack: Pack) -> None:
    """Refuse a pack that was written for a later shardcore."""
    newest = max((spec.api for spec in specs), default=API_VERSION)
    if newest > API_VERSION:
        raise PackError(
            f"it was written for plugin API {newest}, and this shardcore knows {API_VERSION}: "
            f"upgrade shardcore, or install an older {pack.distribution}"
        )


def as_text(value: object) -> str:
    """Return how a value prints, in few words, whatever its ``__repr__`` does."""
    short = reprlib.Repr()
    short.maxother = short.maxstring = 120
    return attempt(lambda: short.repr(value), "its __repr__")


def complaint(pack: Pack) -> str:
    """Say which pack failed to load, and why."""
    cause = "" if pack.error is None else f": {in_one_line(pack.error)}"
    return f"pack {pack}, entry point {pack.value!r}, failed to load{cause}"
