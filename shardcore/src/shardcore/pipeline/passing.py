"""What a stage of a pipeline can compute: its forward, with NaN in the place of what other stages hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import NotSupportedError
from shardcore.pipeline.metadata import PROBE, Boundary, answered, captured
from shardcore.plan.cut import Cut

#: What parts return that a stage holds: any number but NaN, and none that norms divide by zero for.
HELD = 0.5


class BoundaryReached(BaseException):
    """The forward of a stage came to the first block of the next one; nothing of the model may catch it."""


class Passing:
    """Runs the forward as one stage does: what others hold returns NaN, as does what depends on it.

    Args:
        cut: how the model is cut.
        stage: which stage it is.
        held: the parts that the stage holds.
        outputs: what each part returns.
        device: where that is.
        crosses: what was captured inside of earlier blocks arrives too.
    """

    def __init__(
        self,
        cut: Cut,
        stage: int,
        held: Collection[str],
        outputs: Mapping[str, tuple[Any, ...]],
        device: torch.device | str,
        *,
        crosses: bool,
    ) -> None:
        self.cut, self.stage, self.held, self.crosses = cut, stage, held, crosses
        self._outputs, self._device = outputs, device
        self._calls: dict[str, int] = {}
        self._arrived: dict[int, Tensor] = {}  # what crossed, by the id of what stands for it, which it keeps alive
        self._foreign: dict[int, Tensor] = {}  # what others return that cannot be NaN, by its id
        # The leaves that parts of the stage, and the next block, were called with; a probe for each that crosses.
        self.seen: list[list[Any]] = []
        self.boundary: Boundary | None = None

    def called(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look at the arguments of a call of a part; the forward ends where the next stage begins."""
        leaves, _ = tree_flatten((args, kwargs))
        ends = self.ends(name)
        if ends or name in self.held:
            self.look(name, leaves)
        if ends:
            raise BoundaryReached
        return args, kwargs

    def ends(self, name: str) -> bool:
        """Tell whether the next stage begins with this block."""
        end, blocks = self.cut.held(self.stage).stop, self.cut.blocks
        return end < len(blocks) and name == blocks[end]

    def look(self, name: str, leaves: list[Any]) -> None:
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
            raise self.unknown(name, f"a tensor {tuple(loose[0].shape)} that")

    def unknown(self, name: str, what: str) -> NotSupportedError:
        """Return the error of a part that is called with what the stage cannot know."""
        start = self.cut.blocks[self.cut.held(self.stage).start]
        return NotSupportedError(
            f"stage {self.stage} calls {name} with {what} only another stage can compute, and that does not reach "
            f"{start}, the first block of the stage; name what computes it in Stages(everywhere=...), or use "
            "pipeline_parallel_size=1"
        )

    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of a part returns."""
        return self.answer(name, PROBE, 0)

    def answer(self, name: str, number: float, whole: int) -> Any:
        """Return what a call of a part returns; of one that others hold, all is ``number``, or ``whole``."""
        outputs = self._outputs[name]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        if name in self.held:
            return answered(outputs[call % len(outputs)], self._device, HELD)
        out = answered(outputs[call % len(outputs)], self._device, number, whole)
        tensors = (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor))
        self._foreign.update((id(tensor), tensor) for tensor in tensors if not tensor.is_floating_point())
        return out


class Varied(Passing):
    """Runs it again, with numbers in the place of NaN: what is another one then was made of them without being NaN.

    A mask of what is above zero is, and so is any other mask and any position that a part returns.

    Args:
        passing: the first run.
        number: what others hold returns, where that can be NaN.
        whole: ... where it cannot.
    """

    def __init__(self, passing: Passing, number: float, whole: int) -> None:
        super().__init__(
            passing.cut, passing.stage, passing.held, passing._outputs, passing._device, crosses=passing.crosses
        )
        self._before, self._number, self._whole = passing, number, whole

    @override
    def look(self, name: str, leaves: list[Any]) -> None:
        seen, at = self._before.seen, len(self.seen)
        self.seen.append(leaves)
        before = seen[at] if at < len(seen) else []
        apart = other(before, leaves)
        if math.isnan(self._number):  # nothing is varied: what is another one was drawn
            for place in apart:
                before[place] = PROBE
        elif apart or len(before) != len(leaves):
            raise self.unknown(name, "a mask, or numbers, made of what")

    @override
    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.answer(name, self._number, self._whole)


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
