"""How Gemma 3n is sharded: like Gemma 4, with several streams of states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shard_gemma.fourth import BESIDE, Gemma4Policy
from shardcore.policy import Rule
from shardcore.styles import replicate


class Gemma3nPolicy(Gemma4Policy):
    """Gemma 3n for text: what joins its four streams of states, and what goes past attention, is whole on every rank.

    So are the MLPs of blocks that cut gates off by the mean and the spread of all of them (``activation_sparsity``).
    """

    stages = replace(
        Gemma4Policy.stages,
        first=("embed_tokens", *BESIDE, "altup_projections"),
        last=("altup_unembed_projections", "norm"),
        everywhere=("rotary_emb", "per_layer_projection_scale", "per_layer_input_scale"),
    )

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [*super().decoder(), replicate("altup_projections", "altup_unembed_projections")]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block, without its MLP."""
        return [*super().feed_forward(), replicate("altup", "laurel")]

    def own(self, block: Any) -> list[Rule]:
        """Return the rules of the attention and of the MLP of one block."""
        *attention, mlp = super().own(block)
        return [*attention, replicate("mlp") if block.mlp.activation_sparsity else mlp]
