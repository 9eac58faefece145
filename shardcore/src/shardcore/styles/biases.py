"""The word for networks that make biases of heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from typing_extensions import override

from shardcore.nn import Replicated
from shardcore.nn.linear.bias import BiasLinear
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import heads_of
from shardcore.styles._text import written

__all__ = ["bias_net"]


def bias_net(name: str, *, last: str, heads: str | None = None, optional: bool = False) -> Rule:
    """A network inside of a region that makes a bias for each head of coordinates, as in Swin Transformer V2.

    Its last linear is split by heads; what runs before it is replicated, and its gradients are summed.

    Args:
        name: the network; what it is called with needs no gradient.
        last: its last linear, relative to the network, with the same number of outputs for each head.
        heads: the attribute that counts the heads of this one module, in place of the policy's check.
        optional: it may be absent.
    """
    text = written("bias_net", name, last=last, heads=heads)
    return BiasNetRule(text=text, optional=optional, name=name, last=last, heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasNetRule(Rule):
    """`shardcore.styles.bias_net`."""

    name: str
    last: str
    heads: str | None

    @override
    def plan(self, scope: Scope) -> None:
        network = scope.find(self.name)
        end = f"{self.name}.{self.last}"
        last = None if network is None else scope.find(end)
        if network is None or last is None:
            return
        heads = heads_of(scope, self.heads)
        count = 1 if heads is None else heads.query
        if isinstance(last, nn.Linear) and heads is not None and (last.out_features % count or count % scope.ranks):
            what = f"its {last.out_features} output features for {count} heads cannot be split over {scope.ranks} ranks"
            scope.problem(what, "correct last= or heads=, or use a tensor_parallel_size that divides the heads", end)
        scope.swap(end, BiasLinear)
        for below, module in network.named_modules():
            if module is not last and any(p is not None for p in module._parameters.values()):
                scope.swap(f"{self.name}.{below}" if below else self.name, Replicated, partial=True)
