"""Find the installed packs, and the policy that serves a model class.

    entry points --discover--> Registry of Packs --resolve(class)--> Match --load()--> policy class

Discovery handles strings only: neither torch nor transformers is imported before `Match.load`, and then only what the
one pack that matched imports. The loader is our own because pluggy's passes over duplicate names in silence, takes the
order of the file system, and stops at the first plugin that fails.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import importlib_metadata
import pluggy
from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from shardcore import _env, hooks
from shardcore.errors import AmbiguousPolicyError, BrokenPackWarning, NoPolicyError, PackError
from shardcore.hooks import API_VERSION, PolicySpec

__all__ = ["GROUP", "Match", "Pack", "Registry", "default_registry"]

#: The entry-point group in which packs announce themselves.
GROUP = "shardcore.packs"

_UNKNOWN = "unknown"

# Start of a class's full name -> the pack of this project that serves the family.
_FIRST_PARTY = {
    "transformers.models.llama.": "shard-llama",
    "transformers.models.bert.": "shard-bert",
    "transformers.models.vit.": "shard-vit",
    "transformers.models.whisper.": "shard-whisper",
    "timm.": "shard-vit",
}


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
        specs: what it serves; empty unless it is loaded.
    """

    name: str
    distribution: str
    version: str
    value: str
    status: Literal["loaded", "blocked", "broken"]
    error: Exception | None = None
    specs: tuple[PolicySpec, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The outcome of a resolution.

    Attributes:
        spec: the spec that won.
        pack: the pack that offers it.
        cls: the class that the spec names: the model's own, or the nearest of its bases that is served.
    """

    spec: PolicySpec
    pack: Pack
    cls: type

    def load(self) -> type:
        """Import the policy class."""
        module, _, qualname = self.spec.policy.partition(":")
        try:
            policy = operator.attrgetter(qualname)(importlib.import_module(module))
        except Exception as error:
            raise PackError(f"pack {self.pack}: policy {self.spec.policy!r} failed to load: {_line(error)}") from error
        if not isinstance(policy, type):
            raise PackError(f"pack {self.pack}: policy {self.spec.policy!r} is {policy!r}; wanted a class")
        return policy


class Registry:
    """The packs of this environment, and the search for a policy among them.

    Attributes:
        packs: every pack that was found, whatever became of it, in the order of (name, value, distribution).

    Example:
        >>> Registry.discover(entry_points=[]).packs
        ()
    """

    def __init__(self, packs: Iterable[Pack]) -> None:
        self.packs = tuple(packs)
        # Full name of a class -> who offers what for it, in the order of `packs`.
        self._offers: dict[str, list[tuple[PolicySpec, Pack]]] = {}
        for pack in self.packs:
            for spec in pack.specs:
                self._offers.setdefault(spec.target, []).append((spec, pack))

    @classmethod
    def discover(cls, entry_points: Iterable[importlib_metadata.EntryPoint] | None = None) -> Registry:
        """Load every pack that is installed and allowed, each in isolation.

        A pack that fails is recorded as broken and reported in a `BrokenPackWarning`; under `SHARDCORE_STRICT=1` the
        first one raises `PackError`.

        Args:
            entry_points: where to look; every entry point of the group `shardcore.packs` if not given.
        """
        allowed, denied, strict = _env.packs(), _env.disabled_packs(), _env.strict()
        manager = _Manager(hooks.hookspec.project_name)
        manager.add_hookspecs(hooks)
        packs = []
        for entry_point, pack in _advertised(entry_points):
            if _is_among(pack, denied) or (allowed is not None and not _is_among(pack, allowed)):
                packs.append(replace(pack, status="blocked"))
                continue
            packs.append(_load(manager, entry_point, pack))
            if strict and packs[-1].error is not None:
                raise PackError(_complaint(packs[-1])) from packs[-1].error
        # One warning after all packs are loaded: with warnings as errors, a broken pack must not hide the next one.
        broken = [_complaint(pack) for pack in packs if pack.status == "broken"]
        if broken:
            warnings.warn("\n".join(broken), BrokenPackWarning, stacklevel=2)
        return cls(packs)

    def resolve(self, cls: type) -> Match:
        """Find the policy for a model class.

        The nearest class in the MRO that has an offer wins, then the highest priority. Offers whose `requires` is not
        met do not count. Classes are compared by full name, so that nothing has to be imported to compare them, and a
        class that was swapped for a subclass of the same name is still found.

        Raises:
            AmbiguousPolicyError: different policies are offered for the same class with equal priority.
            NoPolicyError: no loaded pack serves the class.
        """
        for base in cls.__mro__:
            offers = [offer for offer in self._offers.get(_full_name(base), ()) if _is_met(offer[0].requires)]
            if not offers:
                continue
            highest = max(spec.priority for spec, _ in offers)
            best = [offer for offer in offers if offer[0].priority == highest]
            if len({spec.policy for spec, _ in best}) > 1:
                raise AmbiguousPolicyError(_ambiguous(cls, best))
            spec, pack = best[0]
            return Match(spec=spec, pack=pack, cls=base)
        raise NoPolicyError("\n".join(self._nothing_found(cls)))

    def _nothing_found(self, cls: type) -> Iterator[str]:
        """Yield the lines of a `NoPolicyError`."""
        names = [_full_name(base) for base in cls.__mro__ if base is not object]
        yield f"no installed pack serves {names[0]}."
        yield f"  looked for: {', '.join(names)}"
        yield "  installed packs:" if self.packs else "  installed packs: none"
        for pack in self.packs:
            yield f"    {pack}: {pack.status}" + (f": {_line(pack.error)}" if pack.error else "")
        for spec, pack in (offer for name in names for offer in self._offers.get(name, ())):
            if spec.requires is not None:
                have = _installed(Requirement(spec.requires).name) or "not installed"
                yield f"  left out: {spec.policy} of pack {pack} requires {spec.requires} (here: {have})"
        first_party = (pack for name in names for start, pack in _FIRST_PARTY.items() if name.startswith(start))
        if family := next(first_party, None):
            yield f"  the first-party pack for this family is {family}"
        yield "  way out: pass policy= (a Policy class or an instance), which needs no pack"


@functools.cache
def default_registry() -> Registry:
    """Return the registry of everything that is installed, discovered on the first call.

    A process keeps one result, because loading the packs is work and because what serves a model should not change in
    the middle of a run. After a change of the environment, `default_registry.cache_clear()` makes the next call look
    again.
    """
    return Registry.discover()


class _Manager(pluggy.PluginManager):
    """A plugin manager that looks at hooks only, so that a plugin's lazy attributes are not all loaded."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if name.startswith("shardcore_") else None


def _advertised(
    entry_points: Iterable[importlib_metadata.EntryPoint] | None,
) -> list[tuple[importlib_metadata.EntryPoint, Pack]]:
    """List what is installed, each once, in an order that does not depend on `sys.path`."""
    found = importlib_metadata.entry_points(group=GROUP) if entry_points is None else entry_points
    unique: dict[tuple[str, str, str], tuple[importlib_metadata.EntryPoint, Pack]] = {}
    for entry in found:
        distribution, version = _origin(entry)
        pack = Pack(name=entry.name, distribution=distribution, version=version, value=entry.value, status="blocked")
        # Of two copies of one distribution, Python imports the one that comes first.
        unique.setdefault((pack.name, pack.value, pack.distribution), (entry, pack))
    return [unique[key] for key in sorted(unique)]


def _origin(entry_point: importlib_metadata.EntryPoint) -> tuple[str, str]:
    """Return the name and the version of the distribution, as far as they can be read."""
    try:
        dist = entry_point.dist
        return (dist.name or _UNKNOWN, dist.version or _UNKNOWN) if dist is not None else (_UNKNOWN, _UNKNOWN)
    except Exception:
        # Damaged metadata is no reason to lose a pack, or all the others with it.
        return (_UNKNOWN, _UNKNOWN)


def _is_among(pack: Pack, names: frozenset[str]) -> bool:
    """Whether a list from the environment names the pack: by name, distribution, or `distribution:name`."""
    own = {pack.name, pack.distribution, f"{pack.distribution}:{pack.name}"}
    return not {_normal(name) for name in own}.isdisjoint(_normal(name) for name in names)


def _normal(name: str) -> str:
    """Return the form in which Python's packaging compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _load(manager: pluggy.PluginManager, entry_point: importlib_metadata.EntryPoint, pack: Pack) -> Pack:
    """Register one pack and collect what it offers; whatever it raises becomes its `error`."""
    # The value is part of the name so that no other pack has it, and a rollback cannot take one that works.
    registered = f"{pack.distribution}:{pack.name}={pack.value}"
    try:
        plugin = entry_point.load()
        manager.register(plugin, name=registered)
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise PackError(f"{pack.value} implements no hook: wanted a function shardcore_*, marked with hookimpl")
        specs = tuple(_offered_by(manager, plugin))
        _check_api(specs, pack)
    except Exception as error:
        # Depending on the release of pluggy, a plugin that fails validation stays registered.
        if manager.has_plugin(registered):
            manager.unregister(name=registered)
        return replace(pack, status="broken", error=error)
    return replace(pack, status="loaded", specs=specs)


def _offered_by(manager: pluggy.PluginManager, plugin: object) -> Iterator[PolicySpec]:
    """Call the hook of one plugin alone: in a call of all plugins, one that raises takes the others with it."""
    for implementation in manager.hook.shardcore_policies.get_hookimpls():
        if implementation.plugin is not plugin:
            continue
        offered = implementation.function()
        if not isinstance(offered, list) or not all(isinstance(spec, PolicySpec) for spec in offered):
            raise PackError(f"shardcore_policies returned {offered!r}; wanted a list of PolicySpec")
        yield from offered


def _check_api(specs: Iterable[PolicySpec], pack: Pack) -> None:
    """Refuse a pack that was written for a later shardcore."""
    newest = max((spec.api for spec in specs), default=API_VERSION)
    if newest > API_VERSION:
        raise PackError(
            f"it was written for plugin API {newest}, and this shardcore knows {API_VERSION}: "
            f"upgrade shardcore, or install an older {pack.distribution}"
        )


def _is_met(requires: str | None) -> bool:
    """Whether what is installed meets a requirement; one whose marker excludes this environment asks for nothing."""
    if requires is None:
        return True
    requirement = Requirement(requires)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    version = _installed(requirement.name)
    try:
        return version is not None and requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _complaint(pack: Pack) -> str:
    cause = "" if pack.error is None else f": {_line(pack.error)}"
    return f"pack {pack}, entry point {pack.value!r}, failed to load{cause}"


def _ambiguous(cls: type, offers: list[tuple[PolicySpec, Pack]]) -> str:
    """Say who offers what for a class, and how to choose."""
    target, priority = offers[0][0].target, offers[0][0].priority
    lines = [f"several policies serve {_full_name(cls)}, all for {target} with priority {priority}:"]
    lines += [f"  {spec.policy} of pack {pack}" for spec, pack in offers]
    names = list(dict.fromkeys(f"{pack.distribution}:{pack.name}" for _, pack in offers))
    lines.append("  way out: pass policy= (a Policy class or an instance)")
    if len(names) > 1:
        lines.append(f"  way out: leave a pack out, with SHARDCORE_DISABLE_PACKS={' or '.join(names)}")
    return "\n".join(lines)
