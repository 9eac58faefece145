"""How the first DeBERTa is sharded: queries, keys and values in one linear, with biases beside it."""

from __future__ import annotations

from typing import Any

from torch import nn

from shard_deberta.policy import DebertaV2Policy
from shardcore.policy import Heads, ModulePolicy, Rule
from shardcore.styles import attribute, by_heads, local_heads, refuse, region, segments, shared_rng


def _mixes_heads(layer: nn.Module) -> bool:
    attention: Any = layer.attention
    return bool(attention.self.talking_head)


class DebertaPolicy(DebertaV2Policy):
    """The encoder, with a head or without."""

    checks = (Heads("num_attention_heads"),)

    def module_policy(self) -> ModulePolicy:
        """Return the rules of DeBERTa-v2, also of a head, for the classes of DeBERTa."""
        rules = super().module_policy()
        return {key.replace("DebertaV2", "Deberta") if isinstance(key, str) else key: rules[key] for key in rules}

    def attention(self) -> list[Rule]:
        """Return the rules of the attention: positions always have linears of their own."""
        config = self.model.config
        positions = {"c2p": "pos_proj", "p2c": "pos_q_proj"}
        kinds = (config.pos_att_type or ()) if config.relative_attention else ()
        linears = [linear for kind, linear in positions.items() if kind in kinds]
        return [
            refuse(_mixes_heads, "talking_head mixes the scores of all heads", todo="set talking_head=False"),
            region(
                enter="attention.self",
                col=(
                    segments("attention.self.in_proj", 3, by="head"),
                    *(f"attention.self.{linear}" for linear in linears),
                ),
                row="attention.output.dense",
                unit="head",
            ),
            by_heads("attention.self.q_bias", "attention.self.v_bias"),
            attribute("attention.self.num_attention_heads", local_heads),
            shared_rng("attention.self.pos_dropout", optional=True),
        ]
