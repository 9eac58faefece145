"""Which blocks are recomputed in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointConfig:
    """How many blocks, from the first on, recompute their activations in the backward instead of keeping them.

    The first stages of a pipeline under a schedule such as 1f1b keep the activations of more micro-batches than the
    last ones, so that recomputing pays there first.

    Attributes:
        gradient_checkpointing_ratio: the share of the blocks, from 0 to 1, rounded down to whole blocks.
        num_ckpt_layers: the number of blocks.
        num_ckpt_layers_per_stage: a number for each stage of a pipeline, counted from the stage's first block, in the
            order in which a micro-batch runs through the stages.

    Raises:
        ConfigError: not one of the three is given, or it is out of range.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers: int | None = None
    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def __post_init__(self) -> None:
        ratio, count, counts = self.gradient_checkpointing_ratio, self.num_ckpt_layers, self.num_ckpt_layers_per_stage
        if [value is None for value in (ratio, count, counts)].count(False) != 1:
            raise ConfigError(
                "GradientCheckpointConfig wants gradient_checkpointing_ratio, num_ckpt_layers or "
                f"num_ckpt_layers_per_stage, one of them; got {ratio!r}, {count!r} and {counts!r}"
            )
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise ConfigError(
                f"GradientCheckpointConfig.gradient_checkpointing_ratio must be a number from 0 to 1, got {ratio!r}"
            )
        if count is not None and (type(count) is not int or count < 0):
            raise ConfigError(
                f"GradientCheckpointConfig.num_ckpt_layers must be an integer of at least 0, got {count!r}"
            )
        if counts is not None:
            if isinstance(counts, str) or any(type(count) is not int or count < 0 for count in counts):
                raise ConfigError(
                    f"GradientCheckpointConfig.num_ckpt_layers_per_stage must be integers of at least 0, got {counts!r}"
                )
            object.__setattr__(self, "num_ckpt_layers_per_stage", tuple(counts))

    def blocks(self, total: int) -> int:
        """Return how many of ``total`` blocks are recomputed.

        Raises:
            ConfigError: more are asked for than there are.
        """
        if self.num_ckpt_layers is None:
            # Rounded before it is cut off, so that 0.29 of 100 blocks are 29 and a third of 12 is 4.
            return int(round((self.gradient_checkpointing_ratio or 0) * total, 6))
        if self.num_ckpt_layers > total:
            raise ConfigError(
                f"GradientCheckpointConfig.num_ckpt_layers is {self.num_ckpt_layers}, but the model has {total} blocks"
            )
        return self.num_ckpt_layers

    def of_stages(self, held: Sequence[int]) -> Sequence[int]:
        """Return how many blocks of each stage are recomputed.

        Args:
            held: how many blocks each stage has.

        Raises:
            ConfigError: there are other stages, or more is asked of one than it has.
        """
        counts = self.num_ckpt_layers_per_stage or ()
        if len(counts) != len(held) or any(count > blocks for count, blocks in zip(counts, held, strict=True)):
            raise ConfigError(
                f"GradientCheckpointConfig.num_ckpt_layers_per_stage is {counts}, but the stages have "
                f"{tuple(held)} blocks"
            )
        return counts
