"""The second half of a divided backward: the gradients of parameters, from where the first half passed by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["add_gradients"]

# Parameters, by what accumulates their gradients; and the nodes at which they meet what arrived, with the gradients
# that the first half had there.
_Group: TypeAlias = tuple[set[Node], dict[Node, tuple[Tensor | None, ...]]]


def add_gradients(parameters: Iterable[nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
    """Add to ``parameters`` their gradients, in the order of ``groups``.

    Of torch's ``stage_backward_weight`` it differs where a parameter meets what arrived at several nodes, as that of a
    block that is called twice does. The way back from one of them may lead through another one, and through nodes of
    other groups: the graph is kept until all are done, and each node passes on what the first half had there. A
    parameter is in one group.

    Args:
        parameters: those that the groups may name.
        groups: what torch's ``stage_backward_input`` returns; they are empty afterwards.
    """
    owners = {get_gradient_edge(parameter).node: parameter for parameter in parameters if parameter.requires_grad}
    apart = _disjoint(groups)
    keeps = any(len(nodes) > 1 for _, nodes in apart)
    for accumulating, nodes in apart:
        edges = [(GradientEdge(node, n), grad) for node, grads in nodes.items() for n, grad in enumerate(grads)]
        edges = [(edge, grad) for edge, grad in edges if grad is not None]
        if not edges:
            continue
        handles = (
            [node.register_prehook(lambda _, grads=grads: grads) for node, grads in nodes.items()] if keeps else []
        )
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in edges],
                [GradientEdge(node, 0) for node in accumulating],
                [grad for _, grad in edges],
                retain_graph=keeps,
            )
        finally:
            for handle in handles:
                handle.remove()
        for node, grad in zip(accumulating, found, strict=True):
            owner = owners[node]
            owner.grad = grad if owner.grad is None else owner.grad.add_(grad)


def _disjoint(groups: Sequence[dict[str, Any]]) -> list[_Group]:
    """Return the groups, those that share a parameter as one: torch has some twice."""
    apart: list[_Group] = []
    for group in groups:
        passed = zip(group["intermediates"], group.get("grads", ()), strict=False)  # no grads: none of them was passed
        nodes = {node: grads for node, grads in passed if grads is not None}
        one: _Group = (set(group["params"]), nodes)
        for other in [other for other in apart if other[0] & one[0]]:
            apart.remove(other)
            one = (other[0] | one[0], other[1] | one[1])
        apart.append(one)
        group.clear()
    return apart
