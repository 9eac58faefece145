"""Which blocks are recomputed in the backward."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.errors import ConfigError

__all__ = ["GradientCheckpointConfig"]


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
