"""The word for output heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from shardcore.nn import ColumnLinear, Replicated, ReplicatedLayout, ShardedLayout, VocabHead
from shardcore.nn.layout import last_rank_is_empty
from shardcore.plan.steps import DivideLogits, EnterRegion, KeepLogitsSharded
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import argument_of, is_parameter
from shardcore.styles._text import written

__all__ = ["head"]


def head(*names: str, bias: str | None = None, optional: bool = False) -> Rule:
    """Split output heads over the vocabulary; the logits are gathered (with ``parallel_output`` only without labels).

    Args:
        *names: the linears.
        bias: a parameter of another module that stands for their bias, as in BERT, where a module holds it beside the
            decoder: it is split as the bias is.
        optional: they may be absent.
    """
    return HeadRule(text=written("head", *names, bias=bias), optional=optional, names=names, bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRule(Rule):
    """`shardcore.styles.head`."""

    names: tuple[str, ...]
    bias: str | None = None

    @override
    def plan(self, scope: Scope) -> None:
        for name in self.names:
            module = scope.find(name)
            if not isinstance(module, nn.Linear):
                if module is not None and scope.swap(name, ColumnLinear).plan_kind_problem(module) is None:
                    what = (
                        f"{type(module).__name__} is no torch.nn.Linear, and heads of other classes are not split yet"
                    )
                    scope.problem(what, "replicate it", name)
                continue
            if self.bias is not None:
                self._plan_bias(scope, self.bias, module)
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
                    self._split(scope, path)
                if (scope.config.context_parallel_size or 1) > 1:
                    scope.add(DivideLogits(path=path))

    def _split(self, scope: Scope, head: str) -> None:
        """Keep the logits split in calls of the model that takes labels, which may be above the head's owner."""
        for path, module in scope.above():
            if labels := argument_of(module, "labels"):
                scope.add(
                    KeepLogitsSharded(path=path, labels=labels, heads=(head,), chunk=scope.config.loss_chunk_size)
                )
                return
        what = "parallel_output=True, but no module that holds the head takes labels"
        scope.problem(what, "say parallel_output=False", head.removeprefix(f"{scope.name('')}."))

    def _plan_bias(self, scope: Scope, name: str, module: nn.Linear) -> None:
        """Give the bare parameter the layout of the bias of ``module``: mostly both are one object."""
        owner, _, parameter = name.rpartition(".")
        if not is_parameter(scope.module, owner, parameter):
            scope.problem(f"{type(scope.module).__name__} has no parameter {name!r}", "correct bias=")
            return
        small = last_rank_is_empty(module.out_features, scope.ranks)
        scope.claim(owner, parameter, ReplicatedLayout() if small else ShardedLayout(0))
