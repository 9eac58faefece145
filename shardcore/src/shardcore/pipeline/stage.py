"""Stages of a pipeline: the model's own forward, for what a stage holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardcore.errors import NotSupportedError
from shardcore.pipeline.metadata import PROBE, StageMetadata, answered, captured
from shardcore.pipeline.passing import BoundaryReached
from shardcore.pipeline.pruning import CallHandler, intercept, parts_of, prune, tensors_below
from shardcore.plan.cut import Cut
from shardcore.transfer.fp8 import Fp8Wire

# On a tensor that stands for one of another stage: what arrived from there. A block that is recomputed in the backward
# is called with the same tensors again, when the stage may be at other arguments.
_ARRIVED = "_pipeline_arrived"

# What to do about a reentrant checkpoint.
_OTHERWISE = 'say use_reentrant=False, as gradient_checkpointing_enable({"use_reentrant": False}) does'


class PrunedModel:
    """A model that keeps the parameters of some stages, under their names, and loses all others.

    Args:
        model: the whole model. What it held beyond these stages is gone.
        cut: how it is cut.
        stages: which stages it holds; none where a trace runs it as one stage after the other.
        device: where it runs.
        dtype: in which it computes, if FSDP2 casts parameters.

    Attributes:
        tensors: what it has lost, by the first name of the part.
        handlers: of the calls of its parts; the first one is asked.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        stages: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.cut, self.stages, self.device = model, cut, tuple(stages), device
        parts = parts_of(model, cut)
        self._names = {name: first for name, (first, _) in parts.items()}
        here = {name for stage in self.stages for name in self.of(stage)}
        self.handlers: list[CallHandler] = [_OutsideOfStages(here)]
        self.tensors = prune(model, self._names.values(), here, device, dtype)
        for name, (first, module) in parts.items():
            if module is not None and (stages or cut.holder(name) is not None):  # traces run what all stages hold
                intercept(module, first, self.handlers)

    def of(self, stage: int) -> tuple[str, ...]:
        """Return the parts that a stage holds, by the first of their names, in the order that every rank has them in.

        A schedule that computes the gradients of parameters apart does so in the order of `Stage.parameters`, and some
        of them are summed over ranks on their way.
        """
        held = (self._names[name] for name in self.cut.parts() if self.cut.holder(name) in (stage, None))
        return tuple(dict.fromkeys(held))


class Join(torch.autograd.Function):
    """A tensor as it is, which a graph takes to depend on what arrived.

    A backward of parameters alone starts from what depends on both. What depends on parameters alone, such as an
    embedding of the decoder in the middle of a pipeline or a bias that many blocks are given, would get no gradient
    where it leaves the stage, and inside of it would be gone back through from each block that reads it, by way of all
    blocks between them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, arrived: Tensor) -> Tensor:
        """Return a copy of the tensor."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return its gradient, and none for what arrived."""
        return grad, None


_join: Callable[[Tensor, Tensor], Tensor] = Join.apply


class Stage:
    """One stage of a `PrunedModel`.

    The model's forward runs with the whole arguments of a call. Parts that other stages hold return NaN of the right
    shapes; the first block of the stage gets what crossed instead, and the forward ends where the next stage begins.

    Args:
        pruned: the model, which holds the stage.
        index: which stage it is.
        splits: gradients of what arrived and of parameters are computed in two backwards.
    """

    def __init__(self, pruned: PrunedModel, index: int, *, splits: bool = False) -> None:
        self.model, self.cut, self.index, self.device = pruned.model, pruned.cut, index, pruned.device
        self.here = pruned.of(index)
        self.splits = splits
        self._handlers = pruned.handlers

    @property
    def is_last(self) -> bool:
        """Whether no stage comes after it."""
        return self.index == len(self.cut) - 1

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the stage, each once, in one order on all ranks."""
        found: dict[int, nn.Parameter] = {}
        for name in self.here:
            for module, leaf in tensors_below(self.model, name):
                if (parameter := module._parameters.get(leaf)) is not None:
                    found[id(parameter)] = parameter
        return list(found.values())

    def __call__(
        self,
        arguments: Mapping[str, Any],
        arrived: Sequence[Tensor],
        metadata: StageMetadata,
        begins: Callable[[int], None] | None = None,
    ) -> Any:
        """Run the stage for one micro-batch.

        Args:
            arguments: those of the whole model.
            arrived: what the stage before sent; nothing for the first one.
            metadata: of arguments of these shapes.
            begins: called with the number of each block of the stage before it runs.

        Returns:
            What crosses to the next stage, a tuple of tensors; of the last stage the output of the model.
        """
        if metadata.fp8 and arrived:
            arrived = Fp8Wire.receive(arrived, metadata.boundaries[self.index - 1].values)
        forward = _StageForward(self, arrived, metadata, begins)
        before, self._handlers[:] = list(self._handlers), [forward]
        try:
            return self.model(**arguments)
        except BoundaryReached:
            return Fp8Wire.send(forward.leaving) if metadata.fp8 else forward.leaving
        finally:
            self._handlers[:] = before


class _StageForward:
    """One forward of a stage."""

    def __init__(
        self, stage: Stage, arrived: Sequence[Tensor], metadata: StageMetadata, begins: Callable[[int], None] | None
    ) -> None:
        self._stage, self._arrived, self._metadata, self._begins = stage, arrived, metadata, begins
        self._calls: dict[str, int] = {}
        held, blocks = stage.cut.held(stage.index), stage.cut.blocks
        self._first = blocks[held.start]
        self._next = None if stage.is_last else blocks[held.stop]
        self._started = False
        self.leaving: tuple[Tensor, ...] = ()
        self._records = torch.is_grad_enabled()
        self._reentrant = False  # something ran in such a checkpoint

    def called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        ends, blocks = name == self._next, self._stage.cut.blocks
        starts = name == self._first and not self._started  # the first call of several
        if name in blocks and self._in_reentrant_checkpoint():
            raise NotSupportedError(
                f"{name} is called in a reentrant checkpoint, to which what arrives from the stage before it gives no "
                f"gradient: {_OTHERWISE}"
            )
        if not ends and name not in self._stage.here:
            return args, kwargs
        if self._arrived:  # or else nothing stands for it
            if starts:
                self._started = True
                leaves, _ = tree_flatten((args, kwargs, captured()))
                places = self._metadata.boundaries[self._stage.index - 1].places
                for place, tensor in zip(places, self._arrived, strict=True):
                    setattr(leaves[place], _ARRIVED, tensor)
                for values in captured():
                    values[:] = _arrived(values)
            args, kwargs = _arrived((args, kwargs))
            if self._stage.splits and name in blocks and not ends:
                args, kwargs = self._dependent(name, args, kwargs)
        if ends:
            leaves, _ = tree_flatten((args, kwargs, captured()))
            self.leaving = tuple(leaves[place] for place in self._metadata.boundaries[self._stage.index].places)
            if self._reentrant and not any(tensor.requires_grad for tensor in self.leaving):
                raise NotSupportedError(
                    f"nothing that enters the blocks of stage {self._stage.index} needs a gradient, so that reentrant "
                    f"checkpoints give none to their parameters and later ones, as torch warns: {_OTHERWISE}"
                )
            if self._stage.splits and self._arrived:
                self.leaving = tuple(_join(t, self._arrived[0]) if t.requires_grad else t for t in self.leaving)
            raise BoundaryReached
        if self._begins is not None and name in blocks:
            self._begins(blocks.index(name))
        return args, kwargs

    def _in_reentrant_checkpoint(self) -> bool:
        """Tell whether gradients are recorded around what runs now, and not in it."""
        return self._records and not torch.is_grad_enabled()

    def _dependent(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Have what a block is called with depend on what arrived: all that has gradients, and its first tensor."""
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, tree = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        follows = name == self._first or self._stage.cut.follows(name)
        depend = {id(tensor) for tensor in (*self._arrived, *(leaves[n] for n in places[: int(follows)]))}
        for place in places:
            leaf = leaves[place]
            if id(leaf) not in depend and (leaf.requires_grad or place == places[0]):
                leaves[place] = _join(leaf, self._arrived[0])
        return tree_unflatten(leaves, tree)  # type: ignore[no-any-return]

    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in self._stage.here:
            self._reentrant = self._reentrant or self._in_reentrant_checkpoint()
            if self._stage.splits and self._reentrant:
                raise NotSupportedError(
                    f"{name} has a reentrant checkpoint, whose backward computes gradients of inputs and of parameters "
                    f"at once, under a schedule that computes them apart: {_OTHERWISE}, or pipeline_schedule='1f1b'"
                )
            return native(*args, **kwargs)
        outputs = self._metadata.outputs[name]
        call = self._calls[name] = self._calls.get(name, -1) + 1
        return answered(outputs[call % len(outputs)], self._stage.device, PROBE, 0)


class _OutsideOfStages:
    """What runs outside of a forward of a stage: blocks that are recomputed, whichever stage they are of."""

    def __init__(self, here: set[str]) -> None:
        self._here = here

    def called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _arrived((args, kwargs))  # type: ignore[no-any-return]

    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in self._here:
            raise NotSupportedError(
                f"{name} is held by another rank of the pipeline, so that the model cannot be called by itself; run it "
                "through its stages"
            )
        return native(*args, **kwargs)


def _arrived(tree: Any) -> Any:
    """Return a tree with what arrived in the place of what stands for it.

    Plain containers are walked here: blocks are called often, and a walk of torch's over their arguments takes ten
    times as long.
    """
    if isinstance(tree, Tensor):
        return getattr(tree, _ARRIVED, tree)
    if type(tree) is dict:
        return {key: _arrived(value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_arrived(value) for value in tree)
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    return tree_map_only(Tensor, _arrived, tree)
