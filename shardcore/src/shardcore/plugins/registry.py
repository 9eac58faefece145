"""Find the installed packs, and the policy that serves a model class.

    entry points --discover--> Registry of Packs --resolve(class)--> Match --load()--> policy class

Discovery handles strings only: neither torch nor a library of models is imported before `Match.load`, and then only
what the one pack that matched imports. The packs are loaded by `shardcore.plugins.loading`.
"""

from __future__ import annotations

import functools
import importlib
import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import importlib_metadata

from shardcore import _env
from shardcore.errors import AmbiguousPolicyError, BrokenPackWarning, NoPolicyError, PackError, UntestedVersionWarning
from shardcore.hooks import ParallelModuleSpec, PolicySpec
from shardcore.plugins.isolation import attempt, in_one_line
from shardcore.plugins.loading import GROUP, Pack, as_text, complaint, load_packs
from shardcore.plugins.unserved import full_name, unserved
from shardcore.plugins.versions import is_met, tested

__all__ = ["GROUP", "Match", "Pack", "Registry", "default_registry"]

Spec = TypeVar("Spec", PolicySpec, ParallelModuleSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The outcome of a resolution.

    Attributes:
        spec: the spec that won.
        pack: the pack that offers it.
        cls: the class that the spec names: the model's own, or the nearest of its bases that is served.
        check: looks at what the pack was tested with, once for a registry.
    """

    spec: PolicySpec
    pack: Pack
    cls: type
    check: Callable[[Pack], None] = field(default=lambda pack: None, compare=False, repr=False)

    def load(self) -> type:
        """Import the policy class.

        Warns with `UntestedVersionWarning`, once and on the first rank, if a library is outside of the range that the
        pack was tested with.

        Raises:
            PackError: there is no such class, or it is no `shardcore.Policy`; or, under `SHARDCORE_STRICT=1`, a
                library is outside of that range.
        """
        found = _load_class(self.pack, "policy", self.spec.policy, self.check)
        from shardcore.policy import Policy  # not above: finding a policy must not import torch

        if not issubclass(found, Policy):
            raise PackError(
                f"pack {self.pack}: policy {self.spec.policy!r} is {found.__qualname__}, which is no subclass of "
                "shardcore.policy.Policy; derive it from that class, or correct policy= of its PolicySpec"
            )
        return found


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
        # Full name of a native class, name of what is replaced -> who brings what.
        self._brought: dict[tuple[str, str], list[tuple[ParallelModuleSpec, Pack]]] = {}
        self._classes: dict[str, type] = {}
        self._checked: set[str] = set()  # packs whose tested ranges were looked at: read once, as the packs are
        for pack in self.packs:
            for spec in pack.specs:
                self._offers.setdefault(spec.target, []).append((spec, pack))
            for module in pack.modules:
                self._brought.setdefault((module.target, module.replaces), []).append((module, pack))
        self._patterns = [target for target in self._offers if "*" in target]

    @classmethod
    def discover(cls, entry_points: Iterable[importlib_metadata.EntryPoint] | None = None) -> Registry:
        """Load every pack that is installed and allowed, each in isolation.

        A pack that fails is recorded as broken and reported in a `BrokenPackWarning`; under `SHARDCORE_STRICT=1` the
        first one raises `PackError`.

        Args:
            entry_points: where to look; every entry point of the group `shardcore.packs` if not given.
        """
        packs = load_packs(entry_points)
        # One warning after all packs are loaded: with warnings as errors, a broken pack must not hide the next one.
        if broken := [complaint(pack) for pack in packs if pack.status == "broken"]:
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
            name = full_name(base)
            offers = self._offers.get(name) or [
                o for p in self._patterns if fnmatchcase(name, p) for o in self._offers[p]
            ]
            # Asked only where something is required: most packs require nothing, and a warm shard() reads no versions.
            if offers := [offer for offer in offers if offer[0].requires is None or is_met(offer[0].requires)]:
                spec, pack = _best("policies serve", cls, offers)
                return Match(spec=spec, pack=pack, cls=base, check=self._check_tested)
        raise NoPolicyError("\n".join(unserved(cls, self.packs, self._offers)))

    def policy_for(self, cls: type) -> tuple[Any, str]:
        """Return a new instance of the policy for a model class, and the distribution and version that it is from.

        Raises:
            AmbiguousPolicyError: different policies are offered for the same class with equal priority.
            NoPolicyError: no loaded pack serves the class.
            PackError: what `Match.load` raises.
        """
        match = self.resolve(cls)
        return match.load()(), f"{match.pack.distribution} {match.pack.version}"

    def parallel_module(self, native: type, replaces: type, enabled: Callable[[str], bool]) -> type | None:
        """Find the class that a pack brings for a native module, or return None if there is none.

        The nearest class in the MRO for which something is brought wins, then the highest priority. What is brought for
        a base counts only if the native class runs that base's ``forward``: the brought one computes nothing else.

        Args:
            native: the class of the native module.
            replaces: the class of shardcore that would be used.
            enabled: whether a switch of the configuration is on, by its name.

        Raises:
            AmbiguousPolicyError: different modules are brought for the same class with equal priority.
            PackError: the brought class cannot be loaded, or is no subclass of ``replaces``.
        """
        forward = getattr(native, "forward", None)
        for base in native.__mro__:
            offers = [
                (spec, pack)
                for spec, pack in self._brought.get((full_name(base), replaces.__name__), ())
                if (spec.option is None or enabled(spec.option)) and is_met(spec.requires)
            ]
            if offers and getattr(base, "forward", None) is forward:
                spec, pack = _best(f"modules replace {replaces.__name__} for", native, offers)
                return self._load_module(spec, pack, replaces)
        return None

    def modules_for(self, config: object) -> Callable[[type, type], Any]:
        """Return `parallel_module` for a configuration, whose attributes are the switches; ``"auto"`` counts as on."""
        return functools.partial(self.parallel_module, enabled=lambda option: bool(getattr(config, option, False)))

    def observe(self, when: Literal["before", "after"], model: object, plan: object) -> None:
        """Call ``shardcore_before_shard`` or ``shardcore_after_shard`` of every pack, in their order.

        Raises:
            PackError: a pack raised; the packs after it were not called.
        """
        hook = f"shardcore_{when}_shard"
        for pack in self.packs:
            if hook not in pack.observers:
                continue
            call = functools.partial(pack.observers[hook], model=model, plan=plan)
            try:
                attempt(call, hook)
            except Exception as error:
                raise PackError(
                    f"pack {pack}: {hook} failed for a {type(model).__name__}: {in_one_line(error)}. Report it to the "
                    f"pack, or leave the pack out with SHARDCORE_DISABLE_PACKS={_switch(pack)}"
                ) from error

    def observes(self, when: Literal["before", "after"]) -> bool:
        """Tell whether `observe` calls anything; the same on ranks that have the same `active` packs."""
        return any(f"shardcore_{when}_shard" in pack.observers for pack in self.packs)

    @property
    def active(self) -> tuple[Pack, ...]:
        """The packs that take part whatever model is sharded: those that observe or bring modules."""
        return tuple(pack for pack in self.packs if pack.observers or pack.modules)

    def _check_tested(self, pack: Pack) -> None:
        if pack.name not in self._checked:
            _check_tested(pack)
            self._checked.add(pack.name)

    def _load_module(self, spec: ParallelModuleSpec, pack: Pack, replaces: type) -> type:
        if spec.module not in self._classes:
            self._classes[spec.module] = _load_class(pack, "parallel module", spec.module, self._check_tested)
        found = self._classes[spec.module]
        if not issubclass(found, replaces):
            raise PackError(
                f"pack {pack}: parallel module {spec.module!r} is no subclass of {full_name(replaces)}, which it "
                f"replaces for {spec.target}; derive it from that class, or correct replaces="
            )
        return found


@functools.cache
def default_registry() -> Registry:
    """Return the registry of everything that is installed, discovered on the first call.

    A process keeps one result, because loading the packs is work and because what serves a model should not change in
    the middle of a run. After a change of the environment, `default_registry.cache_clear()` makes the next call look
    again.
    """
    return Registry.discover()


def _load_class(pack: Pack, what: str, reference: str, check: Callable[[Pack], None]) -> type:
    """Import a class that a pack names, after a look at what the pack was tested with."""
    check(pack)
    module, _, qualname = reference.partition(":")
    try:
        found = attempt(lambda: operator.attrgetter(qualname)(importlib.import_module(module)), reference)
    except Exception as error:
        raise PackError(f"pack {pack}: {what} {reference!r} failed to load: {in_one_line(error)}") from error
    if not isinstance(found, type):
        raise PackError(f"pack {pack}: {what} {reference!r} is {as_text(found)}; wanted a class")
    return found


def _check_tested(pack: Pack) -> None:
    """Warn of libraries outside of the range that the pack's tests prove; under strict, raise."""
    outside = [t for t in tested(pack.distribution) if t.installed is not None and not t.inside]
    if not outside:
        return
    found = ", ".join(f"{t.library} {t.installed} is installed, tested is {t.range}" for t in outside)
    ways = " or ".join(f"{t.library}{t.range}" for t in outside)
    message = (
        f"pack {pack} was not tested with what is installed: {found}. Install {ways}, or a release of "
        f"{pack.distribution} that was tested with it"
    )
    if _env.strict():
        raise PackError(f"{message}; or unset SHARDCORE_STRICT, which makes this a warning.")
    if (launched := _env.torchrun()) is None or launched.rank == 0:  # every rank has the same to say
        warnings.warn(f"{message}; or go on, and check the results.", UntestedVersionWarning, stacklevel=5)


def _switch(pack: Pack) -> str:
    return f"{pack.distribution}:{pack.name}"


def _best(what: str, cls: type, offers: list[tuple[Spec, Pack]]) -> tuple[Spec, Pack]:
    """Return the offer of the highest priority; if it is several, raise, and say how to choose."""
    highest = max(spec.priority for spec, _ in offers)
    best = [offer for offer in offers if offer[0].priority == highest]
    references = [spec.policy if isinstance(spec, PolicySpec) else spec.module for spec, _ in best]
    if len(set(references)) == 1:
        return best[0]
    lines = [f"several {what} {full_name(cls)}, all for {best[0][0].target} with priority {highest}:"]
    lines += [f"  {reference} of pack {pack}" for reference, (_, pack) in zip(references, best, strict=True)]
    lines.append("  way out in Python: pass policy= (a Policy class, an instance or a mapping)")
    names = dict.fromkeys(_switch(pack) for _, pack in best)
    if len(names) > 1:
        lines.append(f"  way out: leave a pack out, with SHARDCORE_DISABLE_PACKS={' or '.join(names)}")
    raise AmbiguousPolicyError("\n".join(lines))
