"""Whose the gradient of every parameter will be, told from the graph of a forward before any backward.

A gradient starts whole at the outputs, which are the same on all ranks, and each autograd function that sends something
says what it makes of one (`shardcore.comm.gradients`). So the graph is walked once, from outputs to parameters, in
the order in which torch runs it backward. Where a whole gradient and a summand of one meet, their sum is neither: from
there on everything gets a `Mistake`, and so it does behind an entry into a region that gets a whole gradient, which
would be counted once for each rank, and behind the end of one that gets a summand.

Mistakes are told where they end, at parameters and arguments that need a gradient: one that ends nowhere, as before the
first trained layer, changes nothing. What comes through a function that says nothing is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shardcore.comm.gradients import ELSEWHERE, PASSES, Flow, GradPlacement

#: Functions of torch that return their inputs, each at its place: FSDP2's mark of where a unit's backward ends, and
#: that of backward hooks of modules.
_ONE_TO_ONE = ("RegisterPostBackwardFunction", "BackwardHookFunction")

Node = Any  # of an autograd graph; torch has no public type for those that Python functions make


@dataclass(frozen=True, slots=True, eq=False)
class Mistake:
    """Where gradients go wrong.

    Attributes:
        kind: a whole gradient and a summand are ``"joined"``; a whole one is ``"summed"`` over the ranks; or a summand
            is ``"left"`` as it is where a region ends.
        node: of the graph, where it happens.
        whole: the node that a whole gradient comes from, if one does.
        own: the node that a summand comes from, if one does.
    """

    kind: Literal["joined", "summed", "left"]
    node: Node
    whole: Node = None
    own: Node = None


class Got(NamedTuple):
    """What arrives at a place of the graph, and from which node."""

    state: GradPlacement | Mistake
    source: Node


def flow_of(node: Node) -> Flow | None:
    """Return what a node does to gradients; None if it does not say so."""
    made_by = getattr(type(node), "_forward_cls", None)  # of nodes that Python functions made
    if made_by is None:
        return PASSES  # an operation of torch
    flow = getattr(made_by, "flow", None)
    if isinstance(flow, Flow):
        tokens = flow.of_tokens is not None and node.length is not None
        return flow.of_tokens if tokens else flow
    return Flow(one_to_one=True) if made_by.__name__ in _ONE_TO_ONE else None


def leaf_of(node: Node) -> Tensor | None:
    """Return the parameter or tensor whose gradient a node adds up, if it is one that does."""
    found = getattr(node, "variable", None)
    return found if isinstance(found, Tensor) else None


def has_entered(x: Tensor, opened_here: Callable[[Node], bool] = lambda node: True) -> bool:
    """Tell whether a tensor came into a region: an entry is nearer behind it than the end of another region.

    An entry that is given a tensor without a gradient leaves no node. Then nothing behind ``x`` needs a gradient but
    parameters that are used inside of the region, and whose gradients are summed where they are read.
    ``opened_here`` tells of an entry that names the members of its region whether it is the one that is meant.
    """
    queue: list[Node] = [] if x.grad_fn is None else [x.grad_fn]
    seen, all_summed = {None, *queue}, bool(queue)
    for node in queue:  # breadth first: the entry is a few nodes away
        flow = flow_of(node)
        # Nobody knows of a compiled graph, nor of a tensor that has entered on another stage of a pipeline.
        if flow is None or flow is ELSEWHERE or (flow.edge == "enters" and (not flow.group or opened_here(node))):
            return True
        if flow.edge == "leaves" or leaf_of(node) is not None:
            all_summed = False
        elif flow.edge or (flow.takes, flow.gives) != (GradPlacement.VARYING, GradPlacement.REPLICATE):
            queue += [n for n, _ in node.next_functions if not (n in seen or seen.add(n))]  # type: ignore[func-returns-value]  # add returns None
    return all_summed


class Graph:
    """The graph behind the outputs of one call, walked once.

    Args:
        outputs: tensors that need a gradient and are the same on all ranks.
        inputs: tensors that the call was given.

    Attributes:
        leaves: every parameter and other tensor without a history, and every input, with what it gets.
    """

    def __init__(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> None:
        # One that has entered already is no input any more: the model's own hooks ran before.
        made = [(t.grad_fn, t) for t in inputs if t.grad_fn is not None]
        self._inputs = {(node, t.output_nr): t for node, t in made if (f := flow_of(node)) is None or f.edge is None}
        roots = [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None]
        self._readers: dict[Node, list[Node]] = {node: [] for node, _ in roots}
        self._arrived: dict[Node, dict[int, Got]] = {}
        self._groups: dict[int, Got] = {}
        self.leaves: list[tuple[Tensor, Got]] = []
        waiting = self._count()
        for node, output in roots:
            self._arrive(node, output, Got(GradPlacement.REPLICATE, None))
        ready = [node for node in self._readers if not waiting[node]]
        while ready:
            node = ready.pop()
            given = self._given(node)
            for (following, output), got in zip(node.next_functions, given, strict=True):
                if following is None:
                    continue
                if got is not None:
                    self._arrive(following, output, got)
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)

    def _count(self) -> Counter[Node]:
        """Find all nodes, and return by how many edges each is reached."""
        edges: Counter[Node] = Counter()
        stack = list(self._readers)
        while stack:
            node = stack.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                edges[following] += 1
                if following not in self._readers:
                    self._readers[following] = []
                    stack.append(following)
                self._readers[following].append(node)
        return edges

    def _arrive(self, node: Node, output: int, got: Got) -> None:
        at = self._arrived.setdefault(node, {})
        at[output] = _joined(node, at.get(output), got)

    def _given(self, node: Node) -> Sequence[Got | None]:
        """Return what ``node`` gives to each of its inputs."""
        at, count = self._arrived.pop(node, {}), len(node.next_functions)
        if (leaf := leaf_of(node)) is not None:
            self.leaves += [(leaf, got) for got in at.values()]
        self.leaves += [(self._inputs[node, n], got) for n, got in at.items() if (node, n) in self._inputs]
        if not at:
            return [None] * count
        flow = flow_of(node)
        if flow is None:
            return [Got(GradPlacement.UNKNOWN, node)] * count
        if flow.one_to_one:
            return [None if i not in at else _through(flow, node, at[i].state) for i in range(count)]
        total = None
        for got in at.values():
            total = _joined(node, total, got)
        if total is None:
            return [None] * count
        given: list[Got | None] = [_through(flow, node, total.state)] * count
        if flow.parameters is not None:
            given[flow.parameters :] = [self._for_parameters(flow, node, total)] * (count - flow.parameters)
        elif flow.group:
            key = id(getattr(node, flow.group))
            self._groups[key] = _joined(node, self._groups.get(key), total)
        return given

    def _for_parameters(self, flow: Flow, node: Node, total: Got) -> Got | None:
        if flow.zeros:
            return None
        if not flow.group:
            return Got(total.state, node)
        got = self._groups.pop(id(getattr(node, flow.group)), None)
        return None if got is None else Got(got.state, node)

    def behind(self, node: Node) -> Iterator[Tensor]:
        """Yield the parameters and other tensors that a node was computed from, nearest first."""
        seen, queue = {node}, [node]
        for at in queue:
            if (leaf := leaf_of(at)) is not None:
                yield leaf
            queue += [n for n, _ in at.next_functions if n is not None and not (n in seen or seen.add(n))]  # type: ignore[func-returns-value]  # add returns None

    def beside(self, node: Node) -> Iterator[Tensor]:
        """Yield the parameters that ``node`` is used together with, or what is made of it, nearest first."""
        seen, queue = {node}, [node]
        for at in queue:
            for following, _ in at.next_functions:
                near = following
                for _ in range(2):  # a parameter, or what has read one
                    if near is not None and leaf_of(near) is not None:
                        yield leaf_of(near)  # type: ignore[misc]  # looked at above
                        break
                    near = _only_reads(near)
            queue += [n for n in self._readers.get(at, ()) if not (n in seen or seen.add(n))]  # type: ignore[func-returns-value]


def _only_reads(node: Node) -> Node:
    flow = None if node is None else flow_of(node)
    further = () if flow is None or not flow.one_to_one else node.next_functions
    return further[0][0] if further else None


def _joined(node: Node, first: Got | None, second: Got) -> Got:
    if first is None or first.state is second.state:
        return second if first is None else first
    for got in (first, second):
        if isinstance(got.state, Mistake):
            return got
    if GradPlacement.UNKNOWN in (first.state, second.state):
        return Got(GradPlacement.UNKNOWN, node)
    whole, own = (first, second) if first.state is GradPlacement.REPLICATE else (second, first)
    return Got(Mistake("joined", node, whole=whole.source, own=own.source), node)


def _through(flow: Flow, node: Node, state: GradPlacement | Mistake) -> Got:
    """Return what a node gives to its input where its output gets ``state``."""
    if isinstance(state, Mistake) or state is GradPlacement.UNKNOWN:
        return Got(state, node)
    if flow.takes not in (None, state):
        return Got(Mistake("summed" if state is GradPlacement.REPLICATE else "left", node), node)
    return Got(flow.gives or state, node)
