"""Dropouts that say whether what they act on is split over the ranks, for policies from Shardformer.

In shardcore no policy has to say it: a sharded model has a random stream of its own, which is forked where activations
are split, and `torch.nn.Dropout` draws from it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor, nn

from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin


class DropoutForReplicatedInput(ParallelMixin, nn.Dropout):
    """A dropout on activations that are the same on all ranks, with the same mask on all of them: `torch.nn.Dropout`.

    It works only inside of a sharded model, where a policy puts it.
    """

    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Dropout,)

    _shard_context: ShardContext

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **options: Any) -> Self:
        """Refuse: a dropout that stands alone has no stream on which the ranks agree.

        Raises:
            NotSupportedError: always; says what a policy and what a layer that stands alone can do.
        """
        raise NotSupportedError(
            f"{cls.__name__} draws from the random stream of a sharded model, so that only a policy can make one: "
            f"SubModuleReplacementDescription(suffix, {cls.__name__}). For a layer that stands alone take "
            "torch.nn.Dropout, with ranks that are seeded alike, or not, as it is to draw"
        )


class DropoutForParallelInput(DropoutForReplicatedInput):
    """A dropout on activations of which each rank holds a part: every rank draws a mask of its own.

    Between a column and a row linear that is what `torch.nn.Dropout` does; this one does it anywhere in the model.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name is part of the interface
        """Return ``input`` with some elements zero and the others scaled, while training."""
        forks = self.training and bool(self.p) and not self._shard_context.random.forking
        if forks:
            self._shard_context.random.fork(id(self))
        try:
            return nn.Dropout.forward(self, input)
        finally:
            if forks:
                self._shard_context.random.join(id(self))
