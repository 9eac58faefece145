"""What a stage of a pipeline can compute: its forward, with NaN in the place of what other stages hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import NotSupportedError
from shardcore.pipeline.metadata import PROBE, Boundary, answered, captured
from shardcore.plan.cut import Cut

#: What parts return that a stage holds: any number but NaN, and none that norms divide by zero for.
HELD = 0.5


class BoundaryReached(BaseException):
    """The forward of a stage came to the first block of the next one; nothing of the model may catch it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Passing:
    """Runs the forward as one stage does: what others hold returns NaN, as does what depends on it.

    Another run has numbers in the place of NaN: what is another one there was made of them without being NaN. A mask of
    what is above zero is, and so is any other mask and any position that a part returns.
    """

    cut: Cut
    stage: int
    held: Collection[str]  # the parts that the stage holds
    outputs: Mapping[str, tuple[Any, ...]]  # what each part returns
    device: torch.device | str
    crosses: bool  # what was captured inside of earlier blocks arrives too
    number: float = PROBE  # what others hold returns, where that can be NaN ...
    whole: int = 0  # ... and where it cannot
    before: list[list[Any]] | None = None  # what the first run has seen, with which this one is compared
    #: The leaves that parts of the stage, and the next block, were called with; a probe for each that crosses.
    seen: list[list[Any]] = field(init=False, default_factory=list)
    boundary: Boundary | None = field(init=False, default=None)  # what crosses to the stage
    _calls: dict[str, int] = field(init=False, default_factory=dict)
    # What crossed, by the id of what stands for it, which it keeps alive.
    _arrived: dict[int, Tensor] = field(init=False, default_factory=dict)
    # What others return that cannot be NaN, by its id.
    _foreign: dict[int, Tensor] = field(init=False, default_factory=dict)

    def called(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look at the arguments of a call of a part; the forward ends where the next stage begins."""
        leaves, _ = tree_flatten((args, kwargs))
        end, blocks = self.cut.held(self.stage).stop, self.cut.blocks
        ends = end < len(blocks) and name == blocks[end]  # the next stage begins here
        if ends or name in self.held:
            if self.before is None:
                self._look(name, leaves)
            else:
                self._compare(name, leaves, self.before)
        if ends:
            raise BoundaryReached
        return args, kwargs

    def _look(self, name: str, leaves: list[Any]) -> None:
        """Find out what crosses to the first block, and that nothing else that only another stage has is needed."""
        start = self.cut.held(self.stage).start
        probes = [place for place, leaf in enumerate(leaves) if is_probe(leaf) or id(leaf) in self._foreign]
        self.seen.append([PROBE if place in probes else leaf for place, leaf in enumerate(leaves)])
        if start and name == self.cut.blocks[start] and self.boundary is None:  # the first call of several
            self._arrived = {id(leaves[place]): leaves[place] for place in probes}
            if self.crosses:
                inside, _ = tree_flatten(captured())
                probes += [place for place, leaf in enumerate(inside, len(leaves)) if is_probe(leaf)]
                leaves += inside
                for values in captured():
                    values[:] = [torch.full_like(v, HELD) if is_probe(v) else v for v in values]
            self.boundary = Boundary.of(name, probes, leaves)
        elif loose := [leaves[place] for place in probes if id(leaves[place]) not in self._arrived]:
            raise self._unknown(name, f"a tensor {tuple(loose[0].shape)} that")

    def _compare(self, name: str, leaves: list[Any], first: list[list[Any]]) -> None:
        """Refuse what is another one than in the first run."""
        at = len(self.seen)
        self.seen.append(leaves)
        before = first[at] if at < len(first) else []
        apart = other(before, leaves)
        if math.isnan(self.number):  # nothing is varied: what is another one was drawn
            for place in apart:
                before[place] = PROBE
        elif apart or len(before) != len(leaves):
            raise self._unknown(name, "a mask, or numbers, made of what")

    def _unknown(self, name: str, what: str) -> NotSupportedError:
        """Return the error of a part that is called with what the stage cannot know."""
        start = self.cut.blocks[self.cut.held(self.stage).start]
        return NotSupportedError(
            f"stage {self.stage} calls {name} with {what} only another stage can compute, and that does not reach "
            f"{start}, the first block of the stage; name what computes it in Stages(everywhere=...), or use "
            "pipeline_parallel_size=1"
        )

    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of a part returns; of one that others hold, all is ``number``, or ``whole``."""
        outputs = self.outputs[name]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        if name in self.held:
            return answered(outputs[call % len(outputs)], self.device, HELD)
        out = answered(outputs[call % len(outputs)], self.device, self.number, self.whole)
        tensors = (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor))
        self._foreign.update((id(tensor), tensor) for tensor in tensors if not tensor.is_floating_point())
        return out


#: What stands for what others hold, in turn: comparisons with any number tell one of them from the others, or from NaN.
#: The first is what stood for it before.
VARIED = ((PROBE, 0), (1e4, 1), (-1e4, 0), (0.0, 1))


def other(before: list[Any], now: list[Any]) -> list[int]:
    """Return the places of leaves that are something else now and were no probe."""
    return [place for place, (one, two) in enumerate(zip(before, now, strict=False)) if not _alike(one, two)]


def is_probe(leaf: Any) -> bool:
    """Tell whether a leaf depends on what another stage holds."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return False
    local = local_tensor(leaf)
    return not local.is_meta and bool(local.isnan().any())


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two leaves of the same call are the same; of what was NaN, or is on meta, that is not asked."""
    if one is PROBE or is_probe(one):
        return True
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        plain = isinstance(one, bool | int | float | str | None | Tensor)
        return not plain or (type(one) is type(other) and one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = local_tensor(one), local_tensor(other)
    return one.is_meta or other.is_meta or torch.equal(one, other)
