"""Words for single modules: split over the ranks or replicated, their attributes, and what they draw."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Any

import torch
from torch import nn

from shardcore.nn import (
    ColumnLinear,
    ParallelMixin,
    Replicated,
    ReplicatedLayout,
    RowLinear,
    SharedNumpy,
    SharedRandom,
    VocabEmbedding,
)
from shardcore.nn.copies import with_value
from shardcore.nn.layout import last_rank_is_empty
from shardcore.nn.linear.alike import product_of
from shardcore.nn.linear.members import ParallelLinear
from shardcore.plan.steps.local import FuseNorm
from shardcore.plan.steps.modules import ByRank, SetAttribute, Swap
from shardcore.policy import HeadCounts, Rule, Scope, Word
from shardcore.styles._finding import is_parameter, submodule, written

_SEEN = object()


def vocab(*names: str, optional: bool = False) -> Rule:
    """Split embeddings over the vocabulary, the rows of their weights."""
    return _swap(written("vocab", *names), names, VocabEmbedding, optional=optional)


def col(*names: str, gather_output: bool = False, optional: bool = False) -> Rule:
    """Split linears over their output features; each enters a region by itself, with an all-reduce of its own.

    Prefer `region` wherever a module boundary marks the entry: it sums the input gradients of all its linears at once,
    and overlaps the communication.
    """
    text = written("col", *names, gather_output=gather_output or None)
    return _swap(text, names, ColumnLinear, optional=optional, gather_output=gather_output)


def row(*names: str, parallel_input: bool = True, optional: bool = False) -> Rule:
    """Split linears over their input features; the outputs are summed over the ranks."""
    text = written("row", *names, parallel_input=None if parallel_input else False)
    return _swap(text, names, RowLinear, optional=optional, parallel_input=parallel_input)


def _swap(
    text: str, names: tuple[str, ...], target: type[ParallelMixin], *, optional: bool = False, **options: Any
) -> Rule:
    """Swap the named modules for ``target``; one too small to give every rank a part is replicated instead."""

    def plan(scope: Scope) -> None:
        for name in names:
            module = scope.find(name)
            if module is None:
                continue
            small = _split_size(module, target)
            if small is not None and last_rank_is_empty(small, scope.ranks):
                scope.swap(name, Replicated)
            else:
                scope.swap(name, target, **options)

    return Word(text=text, optional=optional, planned=plan)


def _split_size(module: nn.Module, target: type[ParallelMixin]) -> int | None:
    """Return the size that splitting ``module`` cuts, or None if nothing is cut."""
    if issubclass(target, VocabEmbedding):
        return module.num_embeddings if isinstance(module, nn.Embedding) else None
    if not issubclass(target, ParallelLinear) or isinstance(product := product_of(module), str):
        return None
    return product.in_features if issubclass(target, RowLinear) else product.out_features


def norm(*names: str, rms: str | None = None, optional: bool = False) -> Rule:
    """Norms outside regions: their parameters are replicated, their forward stays.

    Args:
        *names: the norms.
        rms: the attribute with epsilon, if the norms are root-mean-square norms written out in Python (``weight * x /
            sqrt(mean(x**2) + eps)``): ``enable_fused_normalization`` then runs torch's fused one, by default where the
            weight has 16 bits.
        optional: they may be absent.
    """

    def plan(scope: Scope) -> None:
        for name in names:
            module = scope.find(name)
            if module is None:
                continue
            used = scope.swap(name, Replicated)
            asked = scope.config.enable_fused_normalization
            # By default where its rounding is that of the weights, and something is sharded.
            if asked is None and scope.ranks > 1 and rms is not None:
                asked = getattr(getattr(module, "weight", None), "dtype", None) in (torch.bfloat16, torch.float16)
            # A norm that a pack brings is fused in its own way.
            if asked and (used is Replicated or scope.ranks == 1):
                _fuse(scope, name, module, rms)

    return Word(text=written("norm", *names, rms=rms), optional=optional, planned=plan)


def _fuse(scope: Scope, name: str, module: nn.Module, rms: str | None) -> None:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        return  # torch's own, which is fused
    own = sorted(name for name, p in module._parameters.items() if p is not None)
    if rms and hasattr(module, rms) and own == ["weight"]:
        scope.add(FuseNorm(path=scope.name(name), eps=rms))
    elif rms and hasattr(module, rms):
        found = ", ".join(own) or "none"
        what = f"{type(module).__name__} has the parameters {found}; a root-mean-square norm has a weight alone"
        scope.problem(what, "remove rms= from the rule", name)
    elif rms:
        scope.problem(f"{type(module).__name__} has no attribute {rms!r}", "correct rms=", name)
    elif scope.config.enable_fused_normalization is True:
        scope.problem(
            f"enable_fused_normalization=True, but no fused form of {type(module).__name__} is known",
            "say enable_fused_normalization='auto' (or False), or rms= in the rule if it is such a norm",
            name,
        )


def replicate(*names: str, optional: bool = False) -> Rule:
    """Replicate modules (with everything below them) or bare parameters on every rank."""

    def plan(scope: Scope) -> None:
        for name in names:
            owner, _, parameter = name.rpartition(".")
            if is_parameter(scope.module, owner, parameter):
                scope.claim(owner, parameter, ReplicatedLayout())
                scope.add(Swap(path=scope.name(owner), target=Replicated))
                continue
            module = scope.find(name)
            for below, part in module.named_modules() if module is not None else ():
                if any(p is not None for p in part._parameters.values()):
                    scope.swap(".".join(filter(None, (name, below))), Replicated)

    return Word(text=written("replicate", *names), optional=optional, planned=plan)


def partial(*names: str, optional: bool = False) -> Rule:
    """Replicated modules or bare parameters inside of regions: gradients are partial there, so they are summed.

    For norms on queries and keys, learned activations, norms between the entry of a region and its column linears, and
    tables that all local heads read. If a region is entered at the named module, the parameters that the module owns
    itself are meant.
    """

    def plan(scope: Scope) -> None:
        for name in names:
            owner, _, parameter = name.rpartition(".")
            if is_parameter(scope.module, owner, parameter):
                scope.swap(owner, Replicated, partial=True, names=(parameter,))
            elif scope.find(name) is not None:
                scope.swap(name, Replicated, partial=True)

    return Word(text=written("partial", *names), optional=optional, planned=plan)


def attribute(name: str, value: Any, *, optional: bool = False, literal: bool = False) -> Rule:
    """Set an attribute (dots reach into submodules) to its value for one rank.

    Args:
        name: the attribute; it must exist. One of an object that the module holds, such as
            ``"self_attn.config.num_attention_heads"``, is set on a view of that object which is the module's own: other
            modules, and what is saved, keep the value of the whole model.
        value: the new value, `per_rank` for this rank's part of the old one, or a function of the `HeadCounts` such as
            `local_heads`. Where the ranks do not divide the heads, `per_rank` is for numbers of heads, and for numbers
            that each head has equally many of.
        optional: the submodule may be absent, or be of another kind that has no such attribute.
        literal: True sets a function as the value instead of calling it.
    """

    def plan(scope: Scope) -> None:
        found = _holder(scope, name, optional=optional)
        if found is None:
            return
        owner, holder, short = found
        module = scope.module.get_submodule(owner)
        own = value
        if value is per_rank:
            own = _part(scope, owner, short, getattr(getattr(module, holder) if holder else module, short))
            if own is None:
                return
        elif inspect.isfunction(value) and not literal:
            if scope.heads is None:
                return
            own = ByRank.of([value(scope.heads.at(rank)) for rank in range(scope.ranks)])
        scope.add(SetAttribute(path=scope.name(owner), name=".".join(filter(None, (holder, short))), value=own))

    shown = value.__name__ if inspect.isfunction(value) else repr(value)
    return Word(text=f"attribute({name!r}, {shown})", optional=optional, planned=plan)


def per_rank(value: int, ranks: int) -> int:
    """A number divided by the number of ranks; as the value of an `attribute`."""
    return value // ranks


def local_heads(heads: HeadCounts) -> int:
    """Query heads of one rank."""
    return heads.local_query


def local_kv_heads(heads: HeadCounts) -> int:
    """KV heads that one rank uses; where ranks have parts of groups, some count several times."""
    return heads.local_kv


def local_groups(heads: HeadCounts) -> int:
    """Query heads of one rank for each KV head that it uses."""
    return heads.local_query // heads.local_kv


def _holder(scope: Scope, path: str, *, optional: bool) -> tuple[str, str, str] | None:
    """Return the module, what it holds if that has the attribute, and the attribute; record what is absent."""
    owner, _, name = path.rpartition(".")
    above, _, holder = owner.rpartition(".")
    held = getattr(submodule(scope.module, above), holder, None) if holder else None
    if held is not None and not isinstance(held, nn.Module):
        module, owner, where = held, above, f"{type(held).__name__} ({owner})"
    else:
        module, holder = scope.find(owner), ""
        where = type(module).__name__
    if module is None or (optional and not hasattr(module, name)):
        return None
    if not hasattr(module, name) or (holder and not hasattr(module, "__dict__")):
        scope.problem(
            f"{where} has no attribute {name!r}; setting it would create one that nothing reads",
            "remove the rule, or name the attribute that this version of the model uses",
            owner,
        )
        return None
    if holder and getattr(with_value(module, name, _SEEN), name) is not _SEEN:
        what = f"{where} returns something else for {name!r} than what is set there: the name stands for another one"
        scope.problem(what, "name the attribute that it stands for (attribute_map of a configuration)", owner)
        return None
    return owner, holder, name


def _part(scope: Scope, owner: str, name: str, whole: Any) -> Any:
    """Return the value of `per_rank`, or record why there is none."""
    where = f"{type(scope.module.get_submodule(owner)).__name__}.{name}"
    if not isinstance(whole, Integral) or isinstance(whole, bool):
        scope.problem(
            f"{where} is a {type(whole).__name__}; per_rank divides a whole number",
            "name the attribute that counts, or give the value of one rank in place of per_rank",
            owner,
        )
        return None
    count = int(whole)
    heads = scope.known_heads
    uneven = heads is not None and not heads.is_even
    parts = _parts_by_heads(count, heads) if heads is not None and uneven else None
    if parts is not None:
        return ByRank.of(parts)
    if count % scope.ranks or uneven:
        what = f"{where} is {count}, which {scope.ranks} ranks "
        what += "do not divide" if count % scope.ranks else f"divide, but not the {heads.query if heads else 0} heads"
        todo = "use a tensor_parallel_size that divides it, or give a function of the HeadCounts in place of per_rank"
        scope.problem(what, todo, owner)
        return None
    return per_rank(count, scope.ranks)


def _parts_by_heads(count: int, heads: HeadCounts) -> list[int] | None:
    """Return each rank's part of a number of heads, or of what heads have equally many of; None if it is neither."""
    ranks = [heads.at(rank) for rank in range(heads.ranks)]
    if count % heads.query == 0:
        return [count // heads.query * own.local_query for own in ranks]
    return [own.local_kv for own in ranks] if count == heads.kv else None


def shared_rng(*names: str, optional: bool = False) -> Rule:
    """Modules that draw the same random numbers on all ranks inside regions too (dropping whole samples or paths)."""
    return _swap(written("shared_rng", *names), names, SharedRandom, optional=optional)


def shared_numpy(*methods: str) -> Rule:
    """Methods that draw from numpy's global generator (masks of SpecAugment): the same numbers on all ranks.

    They are those of the module that the rule is listed under. `shardcore.manual_seed` reaches them, numpy's own seed
    does not.
    """
    return _swap(written("shared_numpy", *methods), ("",), SharedNumpy, methods=methods)
