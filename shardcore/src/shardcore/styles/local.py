"""The word for parameters that belong to heads or channels, of which each rank holds those that it computes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shardcore.nn import HeadParameters, Replicated
from shardcore.nn.layout import ShardedLayout, last_rank_is_empty
from shardcore.plan.steps.modules import SetAttribute
from shardcore.policy import Rule, Scope, Word
from shardcore.styles._finding import is_parameter, number_of, written

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS)
Parameters = Mapping[str, nn.Parameter | None]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def by_heads(*names: str, dim: int = 0, heads: str | None = None, optional: bool = False) -> Rule:
    """Split parameters that belong to the heads or channels of a region, so that each rank has those of its own.

    For tables of biases with a column for each head, scales of heads, state matrices and depthwise convolutions of
    channels. Their gradients are the rank's own and are not summed. They are cut as the column linears of their region
    are: sizes in equal parts, where the ranks divide them, and else as `torch.chunk` cuts.

    Args:
        *names: modules, of which all own parameters are meant, or bare parameters. Of a convolution the number of
            groups is divided too.
        dim: the dim along which the heads or channels lie; it may count from the end.
        heads: the attribute that counts the heads, which are then never cut. ``None``: each entry along ``dim`` is a
            head or a channel of its own.
        optional: they may be absent.
    """

    def plan(scope: Scope) -> None:
        for name in names:
            owner, _, parameter = name.rpartition(".")
            if is_parameter(scope.module, owner, parameter):
                held = scope.module.get_submodule(owner)._parameters
                _split(scope, owner, {parameter: held[parameter]}, dim, heads)
            elif (module := scope.find(name)) is not None:
                own = {short: p for short, p in module._parameters.items() if p is not None}
                if problem := _unfit(module, own, dim, scope.ranks):
                    _report(scope, name, own, problem)
                elif _split(scope, name, own, dim, heads) and isinstance(module, _CONVOLUTIONS):
                    groups = module.groups // scope.ranks
                    scope.add(SetAttribute(path=scope.name(name), name="groups", value=groups))

    return Word(text=written("by_heads", *names, dim=dim or None, heads=heads), optional=optional, planned=plan)


def _split(scope: Scope, owner: str, own: Parameters, dim: int, heads: str | None) -> bool:
    """Plan the parameters ``own`` of a module; return whether they are split."""
    sizes = {}
    for name, parameter in own.items():
        if parameter is None or not -parameter.ndim <= dim < parameter.ndim:
            shape = None if parameter is None else tuple(parameter.shape)
            _report(scope, owner, own, (f"{name} {shape} has no dim {dim}", "correct dim="))
            return False
        sizes[name] = parameter.shape[dim]
    if problem := _of_others(scope, sizes) if heads is None else _not_whole(scope, sizes, dim, heads):
        _report(scope, owner, own, problem)
        return False
    if small := any(last_rank_is_empty(size, scope.ranks) for size in sizes.values()):
        # As a region is whose row linear is too small to give every rank a part.
        scope.swap(owner, Replicated, names=tuple(own))
    else:
        scope.swap(owner, HeadParameters, dim=dim, names=tuple(own))
    return not small


def _not_whole(scope: Scope, sizes: dict[str, int], dim: int, heads: str) -> tuple[str, str] | None:
    """Say what would not be whole heads on each rank, if anything."""
    count = number_of(scope, heads)
    if count is None:
        return "its heads cannot be counted", "correct heads="
    if count % scope.ranks:
        what = f"{count} heads ({heads}) cannot be split over {scope.ranks} ranks: whole heads are needed"
        return what, f"use a tensor_parallel_size that divides {count}, or say when_divisible in the policy"
    for name, size in sizes.items():
        if size % count:
            what = f"{name} has {size} entries along dim {dim}, which are not {count} heads ({heads})"
            return what, "correct dim= or heads="
    return None


def _of_others(scope: Scope, sizes: dict[str, int]) -> tuple[str, str] | None:
    """Say which parameter with an entry for each query head would be cut elsewhere than the heads are, if any."""
    heads = scope.known_heads
    if heads is None or heads.is_even:
        return None
    counts = [heads.at(rank).local_query for rank in range(scope.ranks)]
    parts = [ShardedLayout(0).shape((heads.query,), scope.ranks, rank)[0] for rank in range(scope.ranks)]
    for name, size in sizes.items():
        if size == heads.query and parts != counts:
            what = (
                f"{name} has an entry for each of {size} heads, of which {scope.ranks} ranks compute "
                f"{', '.join(map(str, counts))}, but would hold {', '.join(map(str, parts))}"
            )
            return what, f"use a tensor_parallel_size that divides {size}, or say when_divisible in the policy"
    return None


def _unfit(module: nn.Module, own: Parameters, dim: int, ranks: int) -> tuple[str, str] | None:
    """Say why a module that torch knows would not compute the same with local channels, and what to do."""
    kind = type(module).__name__
    if not own:
        return f"{kind} has no parameters of its own", "name the module that holds them"
    if isinstance(module, _NORMS):
        return (
            f"{kind} normalizes over what each rank would have a part of",
            "say partial() if it acts on single heads, or replicate it outside of the region",
        )
    if isinstance(module, nn.Embedding):
        if dim not in (1, -1):
            return "dim 0 of an embedding is looked up by index", "say dim=1 for its columns, or vocab(...)"
        if module.max_norm is not None or module.sparse:
            return "rows with a max_norm, or sparse gradients, need the whole table", "replicate it"
    if isinstance(module, _CONVOLUTIONS) and (dim != 0 or module.groups % ranks):
        return (
            f"{kind} has {module.groups} groups: of each, a rank needs all channels",
            "say dim=0 for a convolution whose groups the ranks divide, or replicate it outside of the region",
        )
    return None


def _report(scope: Scope, owner: str, own: Parameters, problem: tuple[str, str]) -> None:
    scope.problem(*problem, owner)
    for name in own:
        scope.claim(owner, name, None)  # said already: not "covered by no rule" too
