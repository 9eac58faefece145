"""Losses of logits that are split over the vocabulary, for training loops that compute their loss themselves.

A sharded model does so in its own forward (``parallel_output=True``); these are for logits from elsewhere, such as a
`shardcore.nn.ColumnLinear` that stands alone.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from shardcore.errors import ConfigError
from shardcore.mesh.context import as_context
from shardcore.nn.loss.cross_entropy import Vocabulary
from shardcore.nn.loss.logits import VocabParallelLogits


def cross_entropy_1d(
    vocab_logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    mode: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return what `torch.nn.functional.cross_entropy` returns for the full logits, without gathering them.

    Args:
        vocab_logits: this rank's part of the logits, (..., V/tp), in the order of the ranks; parts may be uneven. Or a
            DTensor (..., V) that is split over its last dim.
        labels: (...), each in [0, V) or ``ignore_index``; the same on all ranks.
        ignore_index: a label whose loss does not count.
        process_group: the ranks that hold the parts; None is the default process group.
        vocab_size: V, compared with the sum of the ranks' parts; None uses the sum.
        dtype: not needed: sums are in float32, or wider where logits are.
        mode: ``"mean"`` over the labels that count, ``"sum"``, or ``"none"`` for the loss of each, (...).

    Raises:
        ConfigError: the parts are not ``vocab_size`` words together; on all ranks.
        IndexError: a label is out of range (checked on the CPU).
    """
    split = _split(vocab_logits, process_group, vocab_size)
    losses = split.view(-1, split.size(-1)).cross_entropy(labels.reshape(-1), ignore_index=ignore_index, reduction=mode)
    return losses.view(labels.shape) if mode == "none" else losses


def dist_log_prob_1d(
    vocab_logits: Tensor,
    labels: Tensor,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the logarithm of each label's probability, (..., 1), of logits as `cross_entropy_1d` takes them.

    It is 0, without a gradient, where the label is -100.

    Raises:
        ConfigError: the parts are not ``vocab_size`` words together; on all ranks.
        IndexError: a label is out of range (checked on the CPU).
    """
    losses = cross_entropy_1d(vocab_logits, labels, process_group=process_group, vocab_size=vocab_size, mode="none")
    return -losses.unsqueeze(-1)


def _split(logits: Tensor, process_group: ProcessGroup | None, vocab_size: int | None) -> VocabParallelLogits:
    context = as_context(process_group)
    if isinstance(logits, DTensor):
        if [p.is_shard(logits.ndim - 1) for p in logits.placements] != [True]:
            raise ConfigError(
                f"the placements of the logits are {logits.placements}; wanted Shard({logits.ndim - 1}) alone, their "
                "words split over the ranks of process_group"
            )
        logits = logits.to_local()
    # Every rank learns the same, so that a mistake is an error on all of them.
    held = torch.zeros(context.size, dtype=torch.int64, device=context.device)
    held[context.rank] = logits.size(-1)
    widths = [int(width) for width in context.channel.exact.all_reduce(held).tolist()]
    if vocab_size is not None and sum(widths) != vocab_size:
        raise ConfigError(
            f"vocab_size is {vocab_size}, but the ranks hold {widths}, which are {sum(widths)} words; cut off what is "
            "padding, or leave vocab_size out"
        )
    return VocabParallelLogits(logits, Vocabulary(context, sum(widths), sum(widths[: context.rank])))
