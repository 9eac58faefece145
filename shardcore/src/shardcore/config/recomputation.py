"""Which blocks are recomputed in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcore.errors import ConfigError

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheckpointConfig:
    """How many blocks, from the first on, recompute their activations in the backward instead of keeping them.

    After Shardformer's ``GradientCheckpointConfig`` (ColossalAI).

    Attributes:
        gradient_checkpointing_ratio: the share of the blocks, from 0 to 1, rounded down to whole blocks.
        num_ckpt_layers: the number of blocks; give this or the ratio.

    Raises:
        ConfigError: both or neither are given, or one is out of range.
    """

    gradient_checkpointing_ratio: float | None = None
    num_ckpt_layers: int | None = None

    def __post_init__(self) -> None:
        ratio, count = self.gradient_checkpointing_ratio, self.num_ckpt_layers
        if (ratio is None) == (count is None):
            raise ConfigError(
                "GradientCheckpointConfig wants gradient_checkpointing_ratio or num_ckpt_layers, one of them; got "
                f"{ratio!r} and {count!r}"
            )
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise ConfigError(
                f"GradientCheckpointConfig.gradient_checkpointing_ratio must be a number from 0 to 1, got {ratio!r}"
            )
        if count is not None and (type(count) is not int or count < 0):
            raise ConfigError(
                f"GradientCheckpointConfig.num_ckpt_layers must be an integer of at least 0, got {count!r}"
            )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """How many blocks of each stage of a pipeline, from its first on, are recomputed in the backward.

    The first stages of a schedule such as 1f1b keep the activations of more micro-batches than the last ones, so that
    recomputing pays there first. After Shardformer's ``PipelineGradientCheckpointConfig`` (ColossalAI).

    Attributes:
        num_ckpt_layers_per_stage: a number for each stage, in the order in which a micro-batch runs through them; give
            this, or the share or number of all blocks.

    Raises:
        ConfigError: not one of the three is given, or it is out of range.
    """

    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def __post_init__(self) -> None:
        counts = self.num_ckpt_layers_per_stage
        if counts is None:
            GradientCheckpointConfig.__post_init__(self)
            return
        if self.gradient_checkpointing_ratio is not None or self.num_ckpt_layers is not None:
            raise ConfigError(
                "PipelineGradientCheckpointConfig wants num_ckpt_layers_per_stage, or a share or number of all blocks; "
                "got both"
            )
        if isinstance(counts, str) or any(type(count) is not int or count < 0 for count in counts):
            raise ConfigError(
                "PipelineGradientCheckpointConfig.num_ckpt_layers_per_stage must be integers of at least 0, got "
                f"{counts!r}"
            )
        object.__setattr__(self, "num_ckpt_layers_per_stage", tuple(counts))

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
                f"PipelineGradientCheckpointConfig.num_ckpt_layers_per_stage is {counts}, but the stages have "
                f"{tuple(held)} blocks"
            )
        return counts
