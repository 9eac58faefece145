"""Words for what attention heads have besides linears: norms, biases, arguments, and torch's own attention."""

from __future__ import annotations

from typing import Literal

from torch import nn

from shardcore.nn import Replicated, RowLinear
from shardcore.nn.attention import Of, SplitAttention, output_options
from shardcore.nn.layout import last_rank_is_empty
from shardcore.nn.over_heads import NormOverHeads
from shardcore.plan.steps.regions import SliceArgument
from shardcore.policy import Rule, Scope, Word
from shardcore.styles._finding import argument_of, heads_of, written
from shardcore.styles.columns import Order, Role


def norm_over_heads(
    *names: str, rms: str | None = None, of: Role | Literal["channel"] = "query", optional: bool = False
) -> Rule:
    """Norms over the features of all heads at once, or over all channels, inside of a region (OLMo 2, EVA-02).

    The ranks tell each other a number or two for each token. A norm over the features of each head apart is `partial`.

    Args:
        *names: the norms.
        rms: the attribute with epsilon; the norm computes ``weight * x / sqrt(mean(x**2) + eps)``. None: it is a
            `torch.nn.LayerNorm`.
        of: what they normalize: ``"query"``, or ``"key"`` (or ``"value"``), of which there may be fewer heads, or
            ``"channel"``: features that are no heads, such as those inside of an MLP.
        optional: they may be absent.
    """

    def plan(scope: Scope) -> None:
        for name in names:
            module, heads = scope.find(name), None if of == "channel" else scope.heads
            if module is None or not module._parameters or (of != "channel" and heads is None):
                continue  # some models leave a norm out
            weight = module._parameters.get("weight")
            size = 0 if weight is None else weight.numel()
            if heads is not None and size % (count := heads.query if of == "query" else heads.kv):
                what = f"its {size} features are not whole heads: the configuration counts {count}"
                scope.problem(what, "check Heads(...) in the policy's checks, or of=", name)
                scope.claim(name, "weight", None)
            elif of == "channel" and size and last_rank_is_empty(size, scope.ranks):
                scope.swap(name, Replicated)  # as the region of a row linear that is too small
            elif of == "channel" or heads is None:
                scope.swap(name, NormOverHeads, eps=rms)
            else:
                scope.swap(name, NormOverHeads, eps=rms, used=Order((of,)).rows(size, heads) if size else ())

    text = written("norm_over_heads", *names, rms=rms, of=None if of == "query" else of)
    return Word(text=text, optional=optional, planned=plan)


def slice_arg(
    module: str, name: str, dim: int, *, heads: str | None = None, partial: bool = False, optional: bool = False
) -> Rule:
    """Cut an argument that has all heads to the heads of the rank: ALiBi, a mask by heads, a bias of positions.

    Its gradient, if it needs one, is put together from all ranks.

    Args:
        module: the module whose ``forward`` takes the tensor (``""`` for the one that the rule is listed under).
        name: the argument of that ``forward``; where it is None, nothing is done.
        dim: the dim with the heads: as many as the model has, several times as many with the heads innermost (batch *
            heads), or 1 for a tensor that all heads share.
        heads: the attribute that counts the heads of this one module, in place of the policy's check. It is read when
            the plan is compiled, before an `attribute` rule changes it.
        partial: what makes the tensor sums its gradient itself, because it is `partial`: nothing is sent here.
        optional: the module may be absent.
    """

    def plan(scope: Scope) -> None:
        found = scope.find(module)
        if found is None:
            return
        argument = argument_of(found, name)
        if argument is None:
            scope.problem(f"{type(found).__name__}.forward has no argument {name!r}", "correct it", module)
        counted = heads_of(scope, heads)
        if argument is None or counted is None:
            return
        if (n := counted.query) % scope.ranks:
            what = f"{n} heads ({heads or 'of the policy'}) cannot be split over {scope.ranks} ranks"
            scope.problem(what, f"use a tensor_parallel_size that divides {n}", module)
            return
        scope.add(SliceArgument(path=scope.name(module), argument=argument, dim=dim, heads=n, partial=partial))

    text = written("slice_arg", module, name, dim, heads=heads, partial=partial or None)
    return Word(text=text, optional=optional, planned=plan)


def attention(name: str, *, of: Of = "any", optional: bool = False) -> Rule:
    """Split a `torch.nn.MultiheadAttention` by its heads; the ranks need not divide their number.

    It is a region of its own: what it attends to enters at its call, and its output is summed.

    Args:
        name: the module.
        of: what every call attends to. ``"self"``: query, key and value are one tensor, which enters once.
            ``"memory"``: key and value are one tensor that every rank has whole; it enters here, or below a
            `torch.nn.TransformerDecoder` once for all of its layers. ``"any"``: each of the three enters by itself; not
            where tokens are split.
        optional: it may be absent.
    """

    def plan(scope: Scope) -> None:
        module = scope.find(name)
        if module is None:
            return
        entered = of == "memory" and any(isinstance(m, nn.TransformerDecoder) for _, m in scope.above())
        scope.swap(name, SplitAttention, of=of, entered=entered)
        out = ".".join(filter(None, (name, "out_proj")))
        if not isinstance(module, nn.MultiheadAttention) or module.num_heads < scope.ranks:
            for parameter in module.get_submodule("out_proj")._parameters if hasattr(module, "out_proj") else ():
                scope.claim(out, parameter, None)  # said already: not "covered by no rule" too
            return
        scope.swap(out, RowLinear, **output_options(module, scope.ranks))

    text = written("attention", name, of=None if of == "any" else of)
    return Word(text=text, optional=optional, planned=plan)
