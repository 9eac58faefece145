"""Words for what a model returns: captured outputs, and its loss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from shardcore.plan.steps import GatherOutputs, GatherStageAttentions, TakeLoss
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import argument_of, heads_of
from shardcore.styles._text import names_of, written

__all__ = ["loss", "outputs", "stage_attentions"]


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
    text = written("outputs", **captured, hidden_states=hidden_states, places=places or None, heads=heads)
    by_tokens = ("hidden_states",) if hidden_states == "sequence" else ()
    return OutputsRule(
        text=text, optional=optional, by_heads=by_heads, by_tokens=by_tokens, places=names_of(places), heads=heads
    )


def stage_attentions(heads: str) -> Rule:
    """Gather the attention weights of stages with heads of different numbers, of which the ranks may divide some.

    For an encoder that returns them by name, one for each of its ``layers``, or for a stage that returns them last.

    Args:
        heads: the attribute of a layer (``blocks[0]`` of a stage) that counts its heads.
    """
    return StageAttentionsRule(text=written("stage_attentions", heads), heads=heads)


def loss(
    fn: Callable[..., Any], *, labels: str | tuple[str, ...] = "labels", logits: str | tuple[str, ...] = "logits"
) -> Rule:
    """Compute the loss outside of the model's ``forward``, from its outputs, for models that compute it inside.

    The labels are removed from the arguments, the model's own forward runs without them, and the result of ``fn(model,
    *logits, *labels)`` is put first into its output.

    Args:
        fn: returns the loss; called with the model, the named outputs and the named labels.
        labels: the arguments with labels; without the first of them the model runs as it is.
        logits: the outputs that ``fn`` is given.
    """
    text = written("loss", labels=labels, logits=logits)
    return LossRule(text=text, function=fn, labels=names_of(labels), logits=names_of(logits))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsRule(Rule):
    """`shardcore.styles.outputs`."""

    by_heads: tuple[str, ...]
    by_tokens: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    heads: str | None = None

    @override
    def plan(self, scope: Scope) -> None:
        by_tokens = self.by_tokens if scope.config.enable_sequence_parallelism else ()
        if not self.by_heads and not by_tokens:
            return
        if "forward" in vars(scope.module):
            scope.problem(
                f"this {type(scope.module).__name__} has a forward of its own on the instance, which would be called "
                "instead of the one that gathers outputs",
                "set it on a subclass, or after shard()",
            )
            return
        dims: tuple[tuple[str, int, int | tuple[int, ...]], ...] = ()
        if self.by_heads:
            heads = heads_of(scope, self.heads)
            if heads is None:
                return
            parts = tuple(heads.at(rank).local_query for rank in range(scope.ranks))
            size: int | tuple[int, ...] = heads.query if len(set(parts)) == 1 else parts
            dims = tuple((name, 1, size) for name in self.by_heads)
        scope.add(GatherOutputs(path=scope.name(""), dims=dims, by_tokens=by_tokens, places=self.places))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAttentionsRule(Rule):
    """`shardcore.styles.stage_attentions`."""

    heads: str

    @override
    def plan(self, scope: Scope) -> None:
        stages: Any = getattr(scope.module, "layers", (scope.module,))
        counts = [operator.attrgetter(self.heads)(stage.blocks[0]) for stage in stages]
        sizes = tuple(0 if count % scope.ranks else count for count in counts)
        if any(sizes):
            scope.add(GatherStageAttentions(path=scope.name(""), sizes=sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule(Rule):
    """`shardcore.styles.loss`."""

    function: Callable[..., Any]
    labels: tuple[str, ...]
    logits: tuple[str, ...]

    @override
    def plan(self, scope: Scope) -> None:
        for name in self.labels:
            if argument_of(scope.module, name) is None:
                scope.problem(f"{type(scope.module).__name__}.forward has no argument {name!r}", "correct labels=")
                return
        scope.add(TakeLoss(path=scope.name(""), function=self.function, labels=self.labels, logits=self.logits))
