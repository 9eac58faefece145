"""The word for mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardcore.nn.experts.expert_parallel import ExpertParallel
from shardcore.nn.experts.tensor_parallel import Cut, ExpertTensorParallel
from shardcore.nn.replicated import Replicated
from shardcore.plan.steps.experts import EnterExperts, SyncRouting
from shardcore.policy import Rule, Scope, Word
from shardcore.styles._finding import argument_of, joined, names_of, written

#: What experts begin with, and how many features of it make one of those that they go on with.
UP = {"gate_up_proj": 2, "up_proj": 1}
DOWN = "down_proj"


def experts(
    block: str = "",
    *,
    weights: str = "experts",
    router: str | None = "gate",
    captured: int | None = None,
    col: str | tuple[str, ...] = (),
    row: str | None = None,
    shared_col: str | tuple[str, ...] = (),
    shared_row: str | None = None,
    optional: bool = False,
) -> Rule:
    """A mixture of experts of which each rank has a slice of every expert: its columns, and the rows that follow.

    Activations enter where the block is called, and what it returns is summed there, once for all experts. The router
    is replicated, its gradients are summed.

    With ``expert_parallel_size`` each of so many replicas has whole experts, of which the tensor-parallel ranks of the
    replica have slices, and tokens travel to the replicas of their experts and back. That needs the weights of all
    experts in one module, whose ``forward`` takes ``hidden_states``, ``top_k_index`` and ``top_k_weights``.

    Args:
        block: the module that routes, whose ``forward`` takes the tokens first and returns what its experts add up, or
            a tuple that begins with it. It must not contain the residual connection.
        weights: the module below it that holds the experts: their weights as ``gate_up_proj`` (E, 2I, H), gate and up
            in turns or not, or ``up_proj`` (E, I, H), and ``down_proj`` (E, H, I), or both with their last dims
            exchanged, and biases of them (``down_proj_bias``); or a list of one module for each expert.
        router: the module below it that scores the experts; None if it is outside: the weights of tokens that it makes
            are an `enter_arg` of the block.
        captured: the place, in the tuple that the router returns, of the logits that the model captures for a balancing
            loss. The block must not use them.
        col: of a list of experts: the linears of one that are split over their output features.
        row: of a list of experts: the linear of one that follows, split over its input features.
        shared_col: linears of experts that every token visits, named from the block; what is said of ``col``.
        shared_row: the linear that follows them.
        optional: the block may be absent.
    """

    def plan(scope: Scope) -> None:
        module, place = scope.find(block), joined(block, weights)
        if module is None:
            return
        held, scoring = scope.find(place), nn.Module() if router is None else scope.find(joined(block, router))
        if held is None or scoring is None:
            return
        argument = argument_of(module, None)
        if argument is None:
            scope.problem(f"{type(module).__name__}.forward names no argument", "give it one", block)
            return
        if isinstance(held, nn.ModuleList):
            _listed(scope, place, held, names_of(col), row)
            if scope.config.parameter_shards * (scope.config.dp_replicate_size or 1) > 1:
                scope.add(SyncRouting(path=scope.name(block), weights=weights, experts=len(held)))
        else:
            _stacked(scope, place, held)
        if shared_col or shared_row:
            _linears(scope, block, names_of(shared_col), shared_row, ("shared_col=", "shared_row="))
        for below, part in scoring.named_modules():
            if any(p is not None for p in part._parameters.values()):
                scope.swap(joined(block, router or "", below), Replicated, partial=True)
        scores = scope.name(joined(block, router or ""))
        scope.add(EnterExperts(path=scope.name(block), argument=argument, router=scores, captured=captured))

    named = {"captured": captured, "col": col or None, "row": row}
    shared = {"shared_col": shared_col or None, "shared_row": shared_row}
    text = written("experts", block, weights=weights, router=router, **named, **shared)
    return Word(text=text, optional=optional, planned=plan)


def _listed(scope: Scope, place: str, weights: nn.ModuleList, col: tuple[str, ...], row: str | None) -> None:
    """Split the linears of each expert in a list."""
    if (scope.config.expert_parallel_size or 1) > 1:
        _refuse(
            scope,
            f"its experts are a list of {len(weights)} modules, of which none are given to the axis ep: tokens "
            "travel where all experts are in one module",
            place,
            weights,
        )
    for i in range(len(weights)):
        _linears(scope, f"{place}.{i}", col, row, ("col=", "row="))


def _stacked(scope: Scope, place: str, weights: nn.Module) -> None:
    """Split the weights of all experts in one module."""
    own = {name: p for name, p in weights._parameters.items() if p is not None}
    cuts, down = _cuts(weights, own), own.get(DOWN)
    spread = scope.config.expert_parallel_size or 1  # ranks that share the experts, each with whole ones
    if down is None or cuts is None:
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in own.items())
        _refuse(
            scope,
            f"{type(weights).__name__} has the parameters {shapes or 'none'}; wanted gate_up_proj (E, 2I, H) or "
            f"up_proj (E, I, H), and {DOWN} (E, H, I), or both with their last dims exchanged, and their biases",
            place,
            weights,
        )
    elif spread > 1 and any(cut.filled for cut in cuts):
        _refuse(scope, "experts with biases are not given whole to the axis ep", place, weights)
    elif spread > 1:
        scope.swap(place, ExpertParallel, cuts=cuts, spread=spread)
        shards = scope.config.parameter_shards // spread
        width = down.size(next(3 - cut.dim for cut in cuts if cut.parameter == DOWN))
        if width % shards:
            scope.problem(
                f"FSDP2 divides whole experts along their {width} features, which {shards} ranks (dp_shard_size * "
                "context_parallel_size / expert_parallel_size) do not divide",
                "use a larger expert_parallel_size, or dp_replicate_size for the rest",
                place,
            )
    else:
        scope.swap(place, ExpertTensorParallel, cuts=cuts)


def _linears(scope: Scope, expert: str, col: tuple[str, ...], row: str | None, options: tuple[str, str]) -> None:
    """Split the linears of one expert, or of the experts that every token visits."""
    last = None if row is None else scope.find(joined(expert, row))
    found = {name: scope.find(joined(expert, name)) for name in col}
    if not col or row is None:
        scope.problem(f"{options[0]} and {options[1]} do not name its linears", "name both", expert)
    linears = {name: m for name, m in {**found, row or "": last}.items() if m is not None}
    for name, linear in linears.items():
        place = joined(expert, name)
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            _refuse(scope, f"{type(linear).__name__} computes something else than torch.nn.Linear", place, linear)
        elif name == row and linear.bias is not None:
            what = "its bias would be added on each rank, before the summands are added up"
            _refuse(scope, what, place, linear)
        elif isinstance(last, nn.Linear) and name != row and linear.out_features != last.in_features:
            what = f"it has out_features {linear.out_features}, but {row} that follows has in_features "
            _refuse(scope, what + f"{last.in_features}; both are cut at the same places", place, linear)
        else:
            dims = {"weight": 1} if name == row else {"weight": 0, "bias": 0}
            own = [n for n, p in linear._parameters.items() if p is not None]
            scope.swap(place, ExpertTensorParallel, cuts=tuple(Cut(n, dims.get(n, 0)) for n in own))


def _refuse(scope: Scope, what: str, place: str, module: nn.Module) -> None:
    scope.problem(what, "correct the rule, or say replicate of the whole block in its place", place)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            scope.claim(place, name, None)  # said already: not "covered by no rule" too


def _cuts(weights: nn.Module, own: Mapping[str, Tensor]) -> tuple[Cut, ...] | None:
    """Return where the parameters of all experts are split along I, or None if they do not fit together."""
    name = next((name for name in UP if name in own), "")
    up, down = own.get(name), own.get(DOWN)
    if up is None or down is None or up.ndim != 3 or down.ndim != 3:
        return None
    count, times = len(up), UP[name]

    def fits(dim: int) -> bool:
        return (count, up.size(3 - dim), up.size(dim)) == (len(down), down.size(dim), times * down.size(3 - dim))

    # The dim of `up` that has I features, `times` of each; of `down` it is the other one. Both fit where I is H.
    dim = next(filter(fits, (2, 1) if getattr(weights, "is_transposed", False) else (1, 2)), 0)
    kind = (1, times) if times > 1 and _take_turns(weights) else (times, 1)
    cuts = {name: Cut(name, dim, *kind), DOWN: Cut(DOWN, 3 - dim)}
    cuts |= {f"{name}_bias": Cut(f"{name}_bias", 1, *kind), f"{DOWN}_bias": Cut(f"{DOWN}_bias", 1, filled=True)}
    shapes = {f"{name}_bias": (count, up.size(dim)), f"{DOWN}_bias": (count, down.size(dim))}
    known = dim > 0 and all(other in cuts and tuple(p.shape) == shapes.get(other, p.shape) for other, p in own.items())
    return tuple(cuts[other] for other in own) if known else None


def _take_turns(weights: nn.Module) -> bool:
    """Tell whether gate and up take turns in ``gate_up_proj``: the gate of the module is tried, if it has one."""
    gate, x = getattr(weights, "_apply_gate", None), torch.linspace(-1, 2, 8, device="cpu")
    return torch.allclose(gate(x[:4]), gate(x)[:2]) if gate else not getattr(weights, "is_concatenated", True)
