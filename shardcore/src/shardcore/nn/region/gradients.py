"""Which gradients of a call would be wrong, and what a policy has to say instead."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import splits_on_tp
from shardcore.comm.gradients import GradPlacement
from shardcore.errors import Problem
from shardcore.nn.region.flow import Got, Graph, Mistake

_MOST = 6  # problems that are told: the same mistake is made in each layer

_RULE = "(seen in the first call that records gradients)"


class Wrong(NamedTuple):
    """A parameter, or an argument of the call, that would get a wrong gradient."""

    leaf: Tensor
    got: Got
    wanted: GradPlacement


def wrong_gradients(graph: Graph, own: Mapping[int, Any]) -> list[Wrong]:
    """Return what gets a gradient that it should not.

    ``own`` has the ids of the tensors that are judged: all parameters of the model that are no DTensors, and the
    arguments of the call. Others without a history were made on the way, and nobody reads their gradient.
    """
    found = []
    for leaf, got in graph.leaves:
        if isinstance(leaf, DTensor):
            wanted = GradPlacement.VARYING if splits_on_tp(leaf) else GradPlacement.REPLICATE
        elif id(leaf) in own:
            wanted = GradPlacement.REPLICATE
        else:
            continue
        if got.state not in (wanted, GradPlacement.UNKNOWN):
            found.append(Wrong(leaf, got, wanted))
    return found


def problems(model: nn.Module, graph: Graph, wrong: list[Wrong], arguments: Mapping[int, str]) -> list[Problem]:
    """Return what to tell of ``wrong``, in the order of the model; alike layers once."""
    names = _Names(model, arguments)
    cases: dict[Any, list[Wrong]] = {}
    for item in wrong:
        # All that one mistake reaches is told with it.
        cases.setdefault(item.got.state if isinstance(item.got.state, Mistake) else id(item.leaf), []).append(item)
    told: dict[tuple[str, ...], list[tuple[int, int, Problem]]] = {}
    for items in cases.values():
        problem = _problem(graph, items, names)
        kind = tuple(re.sub(r"\d+", "#", text) for text in (problem.where, problem.todo))
        first = min(names.place(item.leaf) for item in items)
        told.setdefault(kind, []).append((names.order.get(problem.where, first), first, problem))
    alike = [sorted(found, key=lambda entry: entry[:2]) for found in told.values()]
    ordered = sorted(alike, key=lambda found: found[0][:2])
    return [_with_count(found[0][2], len({p.where for _, _, p in found}) - 1) for found in ordered[:_MOST]]


def _with_count(problem: Problem, more: int) -> Problem:
    what = f"{problem.what} ({more} more like it, in other layers)"
    return dataclasses.replace(problem, what=what) if more else problem


class _Names:
    """What tensors are called in messages."""

    def __init__(self, model: nn.Module, arguments: Mapping[int, str]) -> None:
        self._names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._places = {identity: i for i, identity in enumerate(self._names)}
        self._arguments = arguments
        self.order = {name.rpartition(".")[0]: self._places[i] for i, name in reversed(self._names.items())}

    def of(self, leaf: Tensor) -> str:
        """Return the name of a parameter or an argument."""
        if id(leaf) in self._arguments:
            return f"the argument {self._arguments[id(leaf)]}"
        return self._names.get(id(leaf), f"a tensor {tuple(leaf.shape)}")

    def module(self, leaf: Tensor) -> str:
        """Return the name of the module that holds a parameter."""
        return self._names[id(leaf)].rpartition(".")[0] if id(leaf) in self._names else self.of(leaf)

    def place(self, leaf: Tensor) -> int:
        """Return where a tensor comes in the order of the model; arguments come first."""
        return self._places.get(id(leaf), -1)

    def modules(self, leaves: Iterator[Tensor], count: int) -> list[str]:
        """Return the names of the first modules that hold ``leaves``."""
        return list(itertools.islice(dict.fromkeys(map(self.module, itertools.islice(leaves, 8))), count))


def _problem(graph: Graph, items: list[Wrong], names: _Names) -> Problem:
    state = items[0].got.state
    if isinstance(state, Mistake):
        return _TELLS[state.kind](graph, state, _reached(items, names), names)
    leaf = items[0].leaf
    readers = names.modules(graph.beside(items[0].got.source), 2)
    name, where = names.of(leaf), names.module(leaf)
    if items[0].wanted is GradPlacement.VARYING:
        return Problem(
            where=where,
            rule=_RULE,
            what=f"{name} lies split over the ranks, and gets the gradient of a tensor that all of them have whole",
            todo="let a row linear, a gather or a region's end follow, which makes a whole tensor of the parts; or "
            "replicate the module",
        )
    near = [other for other in readers if other != where]
    if name.startswith("the argument"):
        todo = "let it enter once, above: enter_arg(module, argument); slice_arg if it has all "
        todo += "heads; or detach it"
    else:
        todo = (
            f"say partial({where.rpartition('.')[2]!r}), or partial= of the region, if this rank's heads or channels "
            "go through it; if all ranks need the same of it, let what it makes enter: enter= of the region or "
            "enter_arg; or after= if it follows the row linear"
        )
    return Problem(
        where=where,
        rule=_RULE,
        what=f"every rank holds {name} whole, but what it makes is used by this rank's part of the model"
        f"{f' (next to {near[0]})' if near else ''} and nobody sums: its gradient would be one rank's summand",
        todo=todo,
    )


def _reached(items: list[Wrong], names: _Names) -> str:
    first = min(items, key=lambda item: names.place(item.leaf))
    more = len(items) - 1
    others = f" and of {more} other{'s' * (more != 1)}" if more else ""
    return f"the gradient of {names.of(first.leaf)}{others} would be wrong"


def _joined(graph: Graph, mistake: Mistake, reached: str, names: _Names) -> Problem:
    own, whole = (names.modules(graph.beside(node), 1) for node in (mistake.own, mistake.whole))
    entered = _members(mistake.node, names) if mistake.own is not None else []
    to_own = ", ".join(entered or own) or "this rank's part"
    to_whole = ", ".join(whole) or "what all ranks compute alike"
    if entered:
        where = _common(entered)
        what = f"what enters the region of {to_own} goes past it too, to {to_whole}"
        todo = (
            "a residual connection lies inside of what is entered: name in enter= a smaller module, which holds the "
            "column linears and neither the residual nor what follows it; or leave enter= out, so that each column "
            "linear enters by itself. What normalizes after the row linear is no partial(...), it sees whole tensors"
        )
    else:
        made = names.modules(graph.behind(mistake.node), 1)
        where = made[0] if made else ""
        what = (
            f"what {where or 'the model'} makes is read by this rank's heads (next to {to_own}) without entering, and "
        )
        what += f"by what all ranks compute alike (next to {to_whole})"
        todo = (
            f"let it enter for all that reads it: {where.rpartition('.')[2]!r} in enter= of the region, or "
            "enter_arg(module, argument) where it is an argument"
        )
    return Problem(
        where=where,
        rule=_RULE,
        what=f"{what}: a whole gradient and one rank's summand of another are added, and {reached}",
        todo=todo,
    )


def _summed(graph: Graph, mistake: Mistake, reached: str, names: _Names) -> Problem:
    members = _members(mistake.node, names)
    near = members or names.modules(graph.beside(mistake.node), 1)
    where = _common(members) or (names.modules(graph.behind(mistake.node), 1) or [""])[0]
    return Problem(
        where=where,
        rule=_RULE,
        what="its gradient is whole on every rank already, and is summed over them (next to "
        f"{', '.join(near)}): {reached}, counted once for each rank",
        todo="leave out partial(...) for what sees whole tensors (norm, replicate, or after= of the region), enter_arg "
        "and enter= where nothing behind it is split, and a sum of gradients for parameters with a split layout",
    )


def _left(graph: Graph, mistake: Mistake, reached: str, names: _Names) -> Problem:
    made = names.modules(graph.behind(mistake.node), 1)
    near = names.modules(graph.beside(mistake.node), 1)
    return Problem(
        where=made[0] if made else "",
        rule=_RULE,
        what=f"what leaves a region here is used by this rank's part of another (next to {', '.join(near)}) without "
        f"entering: {reached}",
        todo="let it enter: region(enter=...) or enter_arg for what follows; row= of the region names a row linear in "
        "its middle, whose output local channels read, before the last",
    )


_TELLS = {"joined": _joined, "summed": _summed, "left": _left}


def _members(node: Any, names: _Names) -> list[str]:
    """Return the column linears whose region a node enters; empty if it enters none, or does not know."""
    region = getattr(node, "region", None)
    leaves = [] if region is None else region.parameters
    return [name for name in dict.fromkeys(map(names.module, leaves)) if not name.startswith("a tensor")]


def _common(paths: list[str]) -> str:
    """Return the module that holds all of ``paths``."""
    parts = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False)) if parts else ()
    return ".".join(level[0] for level in same)
