"""The head whose logits may stay split over the vocabulary, and models that make their loss of what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds, gather_from_tp
from shardcore.comm.dtensor_params import expect_dtensor
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.linear.parallel import ColumnLinear
from shardcore.nn.loss.cross_entropy import Vocabulary
from shardcore.nn.loss.logits import LazyLogits, VocabParallelLogits
from shardcore.nn.outputs import ReturnDict


class VocabHead(ColumnLinear):
    """A `ColumnLinear` over the vocabulary whose output is gathered, except where the model keeps its logits split.

    Input (..., H); output (..., V), or `VocabParallelLogits` in calls with labels, which `VocabParallelLossModel`
    recognises. See `ColumnLinear` for the options.
    """

    keeps_split: bool
    #: The number of tokens whose logits are computed at a time, within the loss; None computes all in the head.
    chunk: int | None
    _vocabulary: Vocabulary

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context, **options)
        start, _ = chunk_bounds(new.out_features, context.size, context.rank)
        new.keeps_split, new.chunk = False, None
        new._vocabulary = Vocabulary(context, new.out_features, start)
        return new

    def forward(self, input: Tensor) -> Any:  # noqa: A002  # the native argument name is part of the interface
        """Return (..., V), or split logits.

        Raises:
            NotSupportedError: FSDP2 was given the head by itself.
        """
        if self.keeps_split and isinstance(self, FSDPModule):
            raise NotSupportedError(
                f"fully_shard was called on the head (a {type(self).__name__}) by itself, and takes its weight back "
                "when the head returns; the loss of split logits (parallel_output=True) needs it after that. Leave "
                "the head to the fully_shard of the model, as shard(dp=...) does."
            )
        if self.keeps_split and self.chunk is not None:
            for parameter in self.own_parameters:  # which the loss multiplies with as they are
                expect_dtensor(parameter)
            x = input if self.sole_region is None else self.sole_region.enter(input)
            return LazyLogits(x, self._vocabulary, self, self.chunk)
        return self.finish(self.local(input))

    @override
    def finish(self, out: Tensor) -> Any:
        if self.keeps_split:
            return VocabParallelLogits(out, self._vocabulary)
        return gather_from_tp(out, self._shard_context.channel.exact, -1, self.out_features)


class LossFromOutputs(ParallelMixin):
    """A model that runs its own forward without labels and computes the loss afterwards.

    Options:
        function: called with (model, *logits, *labels); returns the loss.
        labels: the arguments that are None in the forward; without the first of them the model runs as it is.
        logits: the outputs that the function is given.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {
        "function": "_shard_loss",
        "labels": "_shard_labels",
        "logits": "_shard_logits",
    }

    _shard_loss: Callable[..., Any]
    _shard_labels: tuple[Argument, ...]
    _shard_logits: tuple[str, ...]
    _loss_return_dict: ReturnDict

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        return_dict = ReturnDict.of(module)
        new = super().swap_class(module, context, **options)
        new.__dict__["_loss_return_dict"] = return_dict
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native forward does, with the loss first where there are labels."""
        values = [label.given(args, kwargs) for label in self._shard_labels]
        if values[0] is None:
            return super().forward(*args, **kwargs)
        for label in self._shard_labels:
            args, kwargs = label.changed(args, kwargs, lambda _: None)
        as_tuple = self._loss_return_dict.is_tuple(self, args, kwargs)
        args, kwargs = self._loss_return_dict.named(args, kwargs)
        out = super().forward(*args, **kwargs)
        loss = self._shard_loss(self, *(out[name] for name in self._shard_logits), *values)
        whole = type(out)(**{**out, "loss": loss})  # whose class declares it first
        return whole.to_tuple() if as_tuple else whole
