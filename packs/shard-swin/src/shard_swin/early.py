"""The layers of Swin in early releases of transformers, with the names of BERT's; Swin V2 still has them."""

from __future__ import annotations

from shard_swin.stages import shared, stage_attentions
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import attribute, by_heads, norm, per_rank, region

HEADS = "attention.self.num_attention_heads"


def layer(*by_head: Rule) -> list[Rule]:
    """Return the rules of a layer; ``by_head`` are those of what its attention has for each head."""
    return [
        norm("layernorm_before", "layernorm_after"),
        shared(
            HEADS,
            region(
                enter="attention.self",
                col=("attention.self.query", "attention.self.key", "attention.self.value"),
                row="attention.output.dense",
                heads=HEADS,
            ),
            attribute(HEADS, per_rank),
            attribute("attention.self.all_head_size", per_rank),
            *by_head,
        ),
        region(col="intermediate.dense", row="output.dense"),
    ]


BLOCKS: ModulePolicy = {
    "SwinLayer": layer(by_heads("attention.self.relative_position_bias_table", dim=1, heads=HEADS)),
    "SwinStage": [stage_attentions(HEADS)],
}
