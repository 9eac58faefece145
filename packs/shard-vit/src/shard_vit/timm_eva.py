"""How timm's EVA is sharded, in all its forms (EVA-02, DINOv3, perception encoders), and BEiT, from which it comes."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from shard_vit.timm_attention import BeitAttention, EvaAttention
from shard_vit.timm_kinds import is_one
from shard_vit.timm_policy import RUNS, VisionTransformerPolicy
from shardcore.policy import Heads, Rule, Scope, Stages, Word
from shardcore.styles import (
    attribute,
    by_heads,
    partial,
    per_rank,
    segments,
    slice_arg,
)


class EvaPolicy(VisionTransformerPolicy):
    """Rotary positions, shared KV heads, and biases of queries and values that stand beside their linear."""

    stages = Stages(
        first=("patch_embed", "cls_token", "reg_token", "pos_embed", "norm_pre"),
        blocks="blocks",
        last=("norm", "attn_pool", "fc_norm", "head"),
        everywhere="rope",
        optional=("norm_pre", "attn_pool"),
    )
    blocks: ClassVar[tuple[str, ...]] = ("EvaBlock", "EvaBlockPostNorm")
    refusals: ClassVar[list[Rule]] = []
    scales: ClassVar[tuple[str, ...]] = ("gamma_1", "gamma_2")
    runs: ClassVar[tuple[str, ...]] = RUNS

    @override
    def attention(self) -> list[Rule]:
        attn, rules = self.first.attn, [attribute("attn.num_heads", per_rank)]
        if attn.qkv is not None:
            rules.append(self.heads(col=[segments("attn.qkv", 3)]))
        else:
            rules.append(Word(text="projections()", planned=self.projections))
        if is_one(attn, "AttentionRope"):
            rules.append(attribute("attn.attn_dim", per_rank))
            rules.append(attribute("attn.num_kv_heads", per_rank, optional=True))  # timm 1.0.23 has no fewer
        else:
            rules.append(by_heads("attn.q_bias", "attn.v_bias", optional=True))
            rules.append(Word(text="attends()", planned=lambda scope: scope.swap("attn", EvaAttention)))
        if getattr(self.model, "rope_mixed", False):  # positions that each head has learned, for all blocks at once
            rules.append(slice_arg("attn", "rope", -3, heads="attn.num_heads", partial=True))
        return rules

    def projections(self, scope: Scope) -> None:
        """Plan the region of an attention with three projections; some blocks of a model may share KV heads."""
        attn: Any = scope.module.attn
        heads = Heads(attn.num_heads, kv=getattr(attn, "num_kv_heads", None))
        self.heads(col=["attn.q_proj"], kv=("attn.k_proj", "attn.v_proj"), heads=heads).plan(scope)

    @override
    def around(self) -> list[Rule]:
        return [partial("rope")] if getattr(self.model, "rope_mixed", False) else []


class BeitPolicy(VisionTransformerPolicy):
    """BEiT and its second version: biases for each distance, in each block or for all of them."""

    stages = Stages(
        first=("patch_embed", "cls_token", "pos_embed"),
        blocks="blocks",
        last=("norm", "fc_norm", "head"),
        everywhere="rel_pos_bias",
    )
    blocks: ClassVar[tuple[str, ...]] = ("Block",)
    refusals: ClassVar[list[Rule]] = []
    scales: ClassVar[tuple[str, ...]] = EvaPolicy.scales
    runs: ClassVar[tuple[str, ...]] = RUNS

    @override
    def attention(self) -> list[Rule]:
        return [
            self.heads(col=[segments("attn.qkv", 3)]),
            attribute("attn.num_heads", per_rank),
            by_heads("attn.q_bias", "attn.v_bias", optional=True),
            by_heads("attn.relative_position_bias_table", dim=1, optional=True),
            Word(text="attends()", planned=lambda scope: scope.swap("attn", BeitAttention)),
        ]

    @override
    def around(self) -> list[Rule]:
        return [by_heads("rel_pos_bias.relative_position_bias_table", dim=1, optional=True)]
