"""Words for variants of a model: split where it is possible, refused where it is not."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from shardcore.policy import Rule, Scope, Word
from shardcore.styles._finding import number_of, written


def when_divisible(size: str, rule: Rule, *, otherwise: Rule) -> Rule:
    """Use ``rule`` where the ranks divide a size of the module, and ``otherwise`` where they do not.

    Args:
        size: an attribute of the module that the rule is listed under (dots reach into submodules), such as a number of
            heads that differs from stage to stage.
        rule: the rule for modules where it divides.
        otherwise: the rule for the others, such as `replicate`.
    """

    def plan(scope: Scope) -> None:
        count = number_of(scope, size)
        if count is not None:
            (otherwise if count % scope.ranks else rule).plan(scope)

    return Word(text=f"when_divisible({size!r}, {rule}, otherwise={otherwise})", planned=plan)


def refuse(
    when: Callable[[nn.Module], bool],
    why: str,
    *,
    todo: str = "build the model without it, or pass shard() a policy of your own",
) -> Rule:
    """Refuse a variant of the model that cannot be split; further problems of the module are then not reported.

    Args:
        when: called with the module that the rule is listed under; tells whether it is such a variant.
        why: what it is, and why it cannot be split.
        todo: what to do instead.
    """

    def plan(scope: Scope) -> None:
        if when(scope.module):
            scope.refuse(why, todo)

    return Word(text=written("refuse", getattr(when, "__name__", "when")), planned=plan)


def layer_drop(name: str) -> Rule:
    """A module that leaves out blocks at random in training (LayerDrop, https://arxiv.org/abs/1909.11556).

    Tensor-parallel ranks draw the same numbers for it, so they leave out the same blocks. Several data-parallel
    replicas are refused: they would leave out different blocks, while FSDP2 gathers each block on all of them.

    Args:
        name: the attribute with the probability.
    """

    def plan(scope: Scope) -> None:
        kind, rate = type(scope.module).__name__, getattr(scope.module, name, None)
        if not isinstance(rate, int | float):
            scope.problem(f"{kind} has no number {name!r}", "correct the name")
        elif rate and (scope.config.data_parallel_size or 1) > 1 and not scope.config.inference_only:
            scope.problem(
                f"{kind}.{name} is {rate}: every data-parallel replica would leave out other blocks in training, "
                "while their collectives wait for the same block on all of them",
                f"set {name} to 0, or use tensor parallelism alone",
            )

    return Word(text=written("layer_drop", name), planned=plan)
