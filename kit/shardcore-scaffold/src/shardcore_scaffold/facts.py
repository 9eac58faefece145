"""What is known of a model before a policy is drafted."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from shardcore.errors import AmbiguousPolicyError, NoPolicyError
from shardcore.plugins.registry import default_registry
from shardcore_scaffold.dependence import Dependence, dependence_of, made_of
from shardcore_scaffold.reading import Numbers, reading
from shardcore_scaffold.structure import Region, regions_of
from shardcore_testing.islands import in_float64

#: Names under which configurations count heads, and key/value heads.
QUERY = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
KV = ("num_key_value_heads", "num_kv_heads")

#: Attributes of norms.
EPS = ("variance_epsilon", "eps", "epsilon")

#: Modules that only hold others.
LISTS = (nn.ModuleList, nn.Sequential)


class Facts:
    """What is known of a model.

    Attributes:
        model: the model.
        fresh: a copy of it that was never called: a model may keep what it computed, which cannot be copied.
        call: calls it.
        said: what was said of a region in a block.
        dependence: what depends on what in it.
        numbers: the numbers that its forwards read.
        modules: by path.
        ties: the names of each parameter.
        regions: what can be split in its blocks.
        norms: norms over the features of all heads, with the linear whose output each normalizes.
        query: the name under which its configuration counts the heads of regions; empty if there is none.
        kv: the name under which it counts key/value heads.
        others: row linears of regions that have as many heads as there are keys by chance, and heads of another kind.
        parts: models inside, by path, that are left to the packs that serve their classes: see `delegating`.
    """

    @in_float64()
    @torch.random.fork_rng(devices=())
    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)  # the same in every process
        self.model, self.call, self.said = model, call, dict[Any, Any]()
        self.fresh = copy.deepcopy(model)
        with reading(model) as numbers:
            self.dependence: Dependence = dependence_of(model, call)
        self.numbers: Numbers = numbers
        self.modules = dict(model.named_modules())
        self.ties: dict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.ties[parameter].append(name)
        candidates = [name for name in self.dependence.linears if self.owner(name) is not None]
        regions, _ = regions_of(self.dependence, candidates)
        self.norms = self._norms_over_heads({column.name for region in regions for column in region.columns})
        if self.norms:  # their sum over all features is a matter of its own: without it heads are heads
            passed = dependence_of(model, call, passing=self.norms)
            wider, _ = regions_of(passed, candidates)
            if len(wider) > len(regions):
                self.dependence, regions = passed, wider
            else:
                self.norms = {}
        self.regions = [region for region in regions if not self._tied(region)]
        self.others: set[str] = set()
        self.parts: dict[str, str] = {}
        self.query, self.kv = self._heads()

    def delegating(self) -> Facts | None:
        """Return what is known of the model around the models inside that packs serve; None if there are none.

        Where no call reaches a model of a class, nothing is known of how it is used, and it stays as it is. Who drafts
        a policy for a class that a pack serves wants one that is not that pack's.
        """
        if _pack_for(self.model):
            return None
        found, above = copy.copy(self), {type(self.model)}
        found.parts = {}
        for linear in self.dependence.linears:
            above |= {type(self.modules[linear[:end]]) for end, sign in enumerate(linear) if sign == "."}
        for path, module in self.modules.items():
            held = path and type(module) in above and hasattr(module, "config") and not found.inside(path)
            if held and (pack := _pack_for(module)):
                found.parts[path] = pack
        if not found.parts:
            return None
        found.regions, found.said, found.others = [r for r in self.regions if not found.inside(r.row)], {}, set()
        found.query, found.kv = found._heads()
        return found

    def inside(self, path: str) -> bool:
        """Tell whether a module is one of the `parts`, or inside of one."""
        return any(path == part or path.startswith(f"{part}.") for part in self.parts)

    def places(self, cls: str) -> set[str]:
        """Return where modules of a class are to which the rules apply."""
        return {path for path, m in self.modules.items() if type(m).__name__ == cls and not self.inside(path)}

    @property
    def groups(self) -> int:
        """How many query heads of the model's configuration share a key/value head."""
        config = getattr(self.model, "config", None)
        return getattr(config, self.query) // getattr(config, self.kv) if self.kv else 1

    def owner(self, path: str) -> str | None:
        """Return the block that ``path`` is in: the innermost member of a list that has a class of its own."""
        parts = path.split(".")
        for end in range(len(parts) - 1, 0, -1):
            above, module = self.modules[".".join(parts[: end - 1])], self.modules[".".join(parts[:end])]
            if isinstance(above, LISTS) and not type(module).__module__.startswith("torch."):
                return ".".join(parts[:end])
        return None

    def as_modules(self, names: Iterable[str]) -> list[str]:
        """Return parameters as the modules that hold nothing else, or by their own names."""
        names, found = set(names), dict[str, None]()
        for name in sorted(names):
            owner, _, _ = name.rpartition(".")
            own = {f"{owner}.{short}" for short, p in self.modules[owner]._parameters.items() if p is not None}
            found[owner if own <= names and not self.modules[owner]._modules else name] = None
        return list(found)

    def _norms_over_heads(self, known: Collection[str]) -> dict[str, str]:
        """Return the root-mean-square norms of all that a linear computes, but for linears that are ``known``."""
        linears = self.dependence.linears
        leaves = [(name, leaf) for name, linear in linears.items() for leaf in linear.outputs]
        found = {}
        for name, module in self.modules.items():
            given = self.dependence.arguments.get(name, {}).get(self.dependence.first.get(name, ""), [])
            made = made_of(given, leaves) if given and rms_eps(module) else set()
            if len(made) == 1 and not made & set(known) and self.owner(name) is not None:
                (linear,) = made
                if all(tensor.shape[-1] == linears[linear].product.out_features for tensor in given):
                    found[name] = linear
        return found

    def _tied(self, region: Region) -> bool:
        """Tell whether a linear of the region has parameters that are used elsewhere too."""
        own = (region.row, *(column.name for column in region.columns))
        tensors = [p for name in own for p in self.modules[name]._parameters.values() if p is not None]
        return any(len(self.ties[p]) > 1 for p in tensors)

    def _heads(self) -> tuple[str, str]:
        """Return the names under which the model's configuration counts heads, if they are those of all regions."""
        config = getattr(self.model, "config", None)
        of_heads = [region for region in self.regions if region.width > 1]
        for query in QUERY:
            count = number(config, query)
            if count is None or not of_heads:
                continue
            kv = next((name for name in KV if number(config, name) is not None), "")
            units = number(config, kv) if kv else count
            if units and all(region.units == units for region in of_heads) and count % units == 0:
                groups = count // units
                self.others = {region.row for region in of_heads if groups > 1 and not self._share(region, groups)}
                if len(self.others) < len(of_heads):
                    return query, kv
        return "", ""

    def counts(self, region: Region) -> bool:
        """Tell whether the configuration counts the units of a region as heads."""
        return bool(self.query) and region.width > 1 and region.row not in self.others

    def _share(self, region: Region, groups: int) -> bool:
        """Tell whether a region's module knows the number of query heads, or of those that share a key."""
        above = common([region.row, *(column.name for column in region.columns)])
        numbers = {**vars(self.modules[above]), **self.numbers.get(above, {})}
        wanted = {"head": region.units * groups, "group|rep|quer|per_kv": groups}
        said = ((n, value) for what, value in wanted.items() for name, n in numbers.items() if re.search(what, name))
        return any(type(n) is int and n == value for n, value in said)


def _pack_for(model: nn.Module) -> str:
    """Return the distribution that serves the class of a model, and not only a base of it; empty if none does."""
    try:
        match = default_registry().resolve(type(model))
    except (NoPolicyError, AmbiguousPolicyError):
        return ""
    return match.pack.distribution if match.cls is type(model) else ""


def number(config: Any, name: str) -> int | None:
    """Return a whole number of a configuration, if it has one of that name for all layers."""
    try:
        value = getattr(config, name, None)
    except Exception:  # some refuse a number that differs from layer to layer
        return None
    return value if type(value) is int else None


def rms_eps(module: nn.Module) -> str:
    """Return the attribute with epsilon of a module that computes ``weight * x / sqrt(mean(x**2) + eps)``, or ""."""
    weight = module._parameters.get("weight")
    names = [name for name in EPS if isinstance(getattr(module, name, None), float)]
    if weight is None or weight.ndim != 1 or module._modules or len(module._parameters) != 1 or not names:
        return ""
    states = torch.randn(3, len(weight), dtype=weight.dtype)
    scale = (states.square().mean(-1, keepdim=True) + getattr(module, names[0])).rsqrt()
    try:
        out = module(states)
    except Exception:
        return ""
    return names[0] if torch.allclose(out, weight * (states * scale)) else ""


def common(paths: list[str]) -> str:
    """Return the path of the innermost module that holds all of some modules."""
    split = [path.split(".")[:-1] for path in paths]
    found = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return ".".join(found)
