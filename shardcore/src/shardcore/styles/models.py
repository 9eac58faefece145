"""Words for whole models: heads, captured outputs and losses, methods that run one, and models inside of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from shardcore.nn import ColumnLinear, Replicated, ReplicatedLayout, ShardedLayout, VocabHead
from shardcore.nn.layout import last_rank_is_empty
from shardcore.plan.steps.outputs import CallByMethods, GatherOutputs, KeepLogitsSharded, TakeLoss
from shardcore.plan.steps.regions import EnterRegion
from shardcore.plan.steps.tokens import DivideLogits
from shardcore.policy import Policy, Rule, Scope, Word
from shardcore.styles._finding import argument_of, heads_of, is_parameter, names_of, written


def outputs(
    *,
    attentions: Literal["heads"] | None = None,
    cross_attentions: Literal["heads"] | None = None,
    hidden_states: Literal["sequence"] | None = None,
    places: str | tuple[str, ...] = (),
    heads: str | None = None,
    optional: bool = False,
) -> Rule:
    """Gather the outputs that a model captures from its layers: attention weights, hidden states.

    Args:
        attentions: ``"heads"`` if attention weights (B, heads, S, S) are split over the heads.
        cross_attentions: likewise of the attention to another sequence, (B, heads, S, T).
        hidden_states: ``"sequence"`` if hidden states of blocks are split along the sequence where the activations are.
        places: outputs that take a place in the returned tuple (``return_dict=False``) even where they are None; most
            modules leave them out.
        heads: the attribute that counts the heads, where not all stacks of the model have equally many.
        optional: the module may be absent.
    """
    captured = {"attentions": attentions, "cross_attentions": cross_attentions}
    by_heads = tuple(name for name, what in captured.items() if what == "heads")

    def plan(scope: Scope) -> None:
        splits_tokens = scope.config.enable_sequence_parallelism and hidden_states == "sequence"
        by_tokens = ("hidden_states",) if splits_tokens else ()
        if not by_heads and not by_tokens:
            return
        if "forward" in vars(scope.module):
            scope.problem(
                f"this {type(scope.module).__name__} has a forward of its own on the instance, which would be called "
                "instead of the one that gathers outputs",
                "set it on a subclass, or after shard()",
            )
            return
        dims: tuple[tuple[str, int, int | tuple[int, ...]], ...] = ()
        if by_heads:
            counted = heads_of(scope, heads)
            if counted is None:
                return
            parts = tuple(counted.at(rank).local_query for rank in range(scope.ranks))
            size: int | tuple[int, ...] = counted.query if len(set(parts)) == 1 else parts
            dims = tuple((name, 1, size) for name in by_heads)
        scope.add(GatherOutputs(path=scope.name(""), dims=dims, by_tokens=by_tokens, places=names_of(places)))

    text = written("outputs", **captured, hidden_states=hidden_states, places=places or None, heads=heads)
    return Word(text=text, optional=optional, planned=plan)


def loss(
    fn: Callable[..., Any], *, labels: str | tuple[str, ...] = "labels", logits: str | tuple[str, ...] = "logits"
) -> Rule:
    """Compute the loss outside of the model's ``forward``, from its outputs, for models that compute it inside.

    The model's own forward is given None in place of the labels, and the result of ``fn(model, *logits, *labels)`` is
    put first into its output.

    Args:
        fn: returns the loss; called with the model, the named outputs and the named labels.
        labels: the arguments with labels; without the first of them the model runs as it is.
        logits: the outputs that ``fn`` is given.
    """

    def plan(scope: Scope) -> None:
        taken = []
        for name in names_of(labels):
            argument = argument_of(scope.module, name)
            if argument is None:
                scope.problem(f"{type(scope.module).__name__}.forward has no argument {name!r}", "correct labels=")
                return
            taken.append(argument)
        scope.add(TakeLoss(path=scope.name(""), function=fn, labels=tuple(taken), logits=names_of(logits)))

    return Word(text=written("loss", labels=labels, logits=logits), planned=plan)


def head(*names: str, bias: str | None = None, optional: bool = False) -> Rule:
    """Split output heads over the vocabulary; the logits are gathered (with ``parallel_output`` only without labels).

    Args:
        *names: the linears.
        bias: a parameter of another module that stands for their bias, as in BERT, where a module holds it beside the
            decoder: it is split as the bias is.
        optional: they may be absent.
    """

    def plan(scope: Scope) -> None:
        for name in names:
            module = scope.find(name)
            if not isinstance(module, nn.Linear):
                if module is not None and scope.swap(name, ColumnLinear).plan_kind_problem(module) is None:
                    what = (
                        f"{type(module).__name__} is no torch.nn.Linear, and heads of other classes are not split yet"
                    )
                    scope.problem(what, "replicate it", name)
                continue
            if bias is not None:
                _plan_bias(scope, bias, module)
            if last_rank_is_empty(module.out_features, scope.ranks):
                scope.swap(name, Replicated)
            elif scope.config.inference_only:
                scope.swap(name, ColumnLinear, gather_output=True)
            else:
                target = VocabHead if scope.config.parallel_output else ColumnLinear
                scope.swap(name, target, gather_output=True, enters=False)
                path = scope.name(name)
                scope.add(EnterRegion(path=path, argument=("input", 0), members=(path,), row=None, block=path))
                if scope.config.parallel_output:
                    _keep_split(scope, path)
                if (scope.config.context_parallel_size or 1) > 1:
                    scope.add(DivideLogits(path=path))

    return Word(text=written("head", *names, bias=bias), optional=optional, planned=plan)


def _keep_split(scope: Scope, head: str) -> None:
    """Keep the logits split in calls of the model that takes labels, which may be above the head's owner."""
    for path, module in scope.above():
        if labels := argument_of(module, "labels"):
            chunk = scope.config.loss_chunk_size
            scope.add(KeepLogitsSharded(path=path, labels=labels, heads=(head,), chunk=chunk))
            return
    what = "parallel_output=True, but no module that holds the head takes labels"
    scope.problem(what, "say parallel_output=False", head.removeprefix(f"{scope.name('')}."))


def _plan_bias(scope: Scope, name: str, module: nn.Linear) -> None:
    """Give the bare parameter the layout of the bias of ``module``: mostly both are one object."""
    owner, _, parameter = name.rpartition(".")
    if not is_parameter(scope.module, owner, parameter):
        scope.problem(f"{type(scope.module).__name__} has no parameter {name!r}", "correct bias=")
        return
    small = last_rank_is_empty(module.out_features, scope.ranks)
    scope.claim(owner, parameter, ReplicatedLayout() if small else ShardedLayout(0))


def calls(*methods: str) -> Rule:
    """Methods besides ``forward`` that users call to run the module (``forward_features``, ``get_image_features``).

    They are methods of the module that the rule is listed under, and may call each other and ``forward``. While one
    runs, everything is as in a forward: the model's random stream is in use, the module's own replicated parameters are
    local tensors, and FSDP2 has gathered them.
    """

    def plan(scope: Scope) -> None:
        kind = type(scope.module)
        missing = [name for name in methods if not inspect.isfunction(getattr(kind, name, None))]
        own = [name for name in methods if name in vars(scope.module)]
        if missing:
            scope.problem(f"{kind.__name__} has no method {', '.join(missing)}", "correct the names")
        elif own:
            what = f"this {kind.__name__} has {', '.join(own)} on the instance, which would be called in its place"
            scope.problem(what, "set it on a subclass, or after shard()")
        else:
            scope.add(CallByMethods(path=scope.name(""), methods=methods))

    return Word(text=written("calls", *methods), planned=plan)


def delegate(name: str, *, policy: Policy | type[Policy] | None = None, optional: bool = False) -> Rule:
    """Leave a submodule that is a model of another family to the policy for its class: a vision tower, a decoder.

    That policy is planned for the submodule as if it were the whole model: its checks and heads go by the submodule's
    own configuration, its rules apply in the submodule alone, and no rule of this policy applies there. What the
    submodule does as a model (`generate`, saving) it does by that policy too. In ``stages`` of this policy, ``blocks``
    names the submodule where its blocks run, and its own stages are put there.

    Args:
        name: the submodule.
        policy: its policy or the class of it; None looks for the installed pack that serves the class of the submodule.
        optional: it may be absent.
    """
    shown = getattr(policy, "__qualname__", type(policy).__qualname__) if policy is not None else None
    return DelegateRule(text=written("delegate", name, policy=shown), optional=optional, name=name, policy=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegateRule(Rule):
    """`shardcore.styles.delegate`."""

    name: str
    policy: Policy | type[Policy] | None = None

    @override
    def plan(self, scope: Scope) -> None:
        """Nothing is left to plan: whose rules apply where is found out before any rule is planned."""
