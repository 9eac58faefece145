"""Words for variants of a model: split where it is possible, refused where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from shardcore.policy import Rule, Scope
from shardcore.styles._finding import number_of, written


def when_divisible(size: str, rule: Rule, *, otherwise: Rule) -> Rule:
    """Use ``rule`` where the ranks divide a size of the module, and ``otherwise`` where they do not.

    Args:
        size: an attribute of the module that the rule is listed under (dots reach into submodules), such as a number of
            heads that differs from stage to stage.
        rule: the rule for modules where it divides.
        otherwise: the rule for the others, such as `replicate`.
    """
    text = f"when_divisible({size!r}, {rule}, otherwise={otherwise})"
    return WhenDivisibleRule(text=text, size=size, rule=rule, otherwise=otherwise)


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
    return RefuseRule(text=written("refuse", getattr(when, "__name__", "when")), when=when, why=why, todo=todo)


def layer_drop(name: str) -> Rule:
    """A module that leaves out blocks at random in training (LayerDrop, https://arxiv.org/abs/1909.11556).

    Tensor-parallel ranks draw the same numbers for it, so they leave out the same blocks. Several data-parallel
    replicas are refused: they would leave out different blocks, while FSDP2 gathers each block on all of them.

    Args:
        name: the attribute with the probability.
    """
    return LayerDropRule(text=written("layer_drop", name), name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenDivisibleRule(Rule):
    """`shardcore.styles.when_divisible`."""

    size: str
    rule: Rule
    otherwise: Rule

    @override
    def plan(self, scope: Scope) -> None:
        size = number_of(scope, self.size)
        if size is not None:
            (self.otherwise if size % scope.ranks else self.rule).plan(scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRule(Rule):
    """`shardcore.styles.refuse`."""

    when: Callable[[nn.Module], bool]
    why: str
    todo: str

    @override
    def plan(self, scope: Scope) -> None:
        if self.when(scope.module):
            scope.refuse(self.why, self.todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDropRule(Rule):
    """`shardcore.styles.layer_drop`."""

    name: str

    @override
    def plan(self, scope: Scope) -> None:
        kind, rate = type(scope.module).__name__, getattr(scope.module, self.name, None)
        if not isinstance(rate, int | float):
            scope.problem(f"{kind} has no number {self.name!r}", "correct the name")
        elif rate and (scope.config.data_parallel_size or 1) > 1 and not scope.config.inference_only:
            scope.problem(
                f"{kind}.{self.name} is {rate}: every data-parallel replica would leave out other blocks in training, "
                "while their collectives wait for the same block on all of them",
                f"set {self.name} to 0, or use tensor parallelism alone",
            )
