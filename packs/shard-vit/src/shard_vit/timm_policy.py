"""How timm's vision transformers are sharded: all plain models of ``vision_transformer.py``, DeiT included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from shard_vit.timm_kinds import BLOCKS, MLPS, REFUSALS, is_one
from shardcore.policy import ModulePolicy, Policy, Rule, Stages
from shardcore.styles import (
    attribute,
    calls,
    norm,
    norm_over_heads,
    per_rank,
    region,
    replicate,
    segments,
    sequence,
    shared_rng,
)

#: The methods besides ``forward`` that run a model.
RUNS = ("forward_features", "forward_head", "forward_intermediates")


class VisionTransformerPolicy(Policy):
    """Vision transformers with any pooling, register tokens, LayerScale, gates, and norms wherever timm has some."""

    stages = Stages(
        first=("patch_embed", "cls_token", "reg_token", "dist_token", "pos_embed", "norm_pre"),
        blocks="blocks",
        last=("norm", "attn_pool", "fc_norm", "head", "head_dist"),
        optional=("dist_token", "head_dist"),  # DeiT's own
    )
    blocks: ClassVar[tuple[str, ...]] = BLOCKS
    refusals: ClassVar[list[Rule]] = REFUSALS
    scales: ClassVar[tuple[str, ...]] = ("ls1", "ls2")
    runs: ClassVar[tuple[str, ...]] = (*RUNS, "get_intermediate_layers")

    @property
    def first(self) -> Any:
        """The first block."""
        return next(iter(self.model.blocks.children()))

    def module_policy(self) -> ModulePolicy:
        """Return the rules for the blocks and MLPs that this model has."""
        whole = ("cls_token", "reg_token", "dist_token", "pos_embed", "attn_pool", "head_dist", "norm_pre")
        return {
            self.model: [
                *self.refusals,
                replicate(*whole, optional=True),
                replicate("patch_embed", "norm", "fc_norm", "head"),
                sequence(scatter="blocks[0]", gather="norm"),
                calls(*self.runs),
                *self.around(),
            ],
            next((kind for kind in self.blocks if is_one(self.first, kind)), self.blocks[0]): [
                norm("norm1", "norm2"),
                *self.attention(),
                norm_over_heads("attn.norm", of="channel", optional=True),
                region(enter="mlp", col=self.mlp, row="mlp.fc2"),
                norm_over_heads("mlp.norm", of="channel", optional=True),
                replicate(*self.scales, optional=True),
                shared_rng("drop_path1", "drop_path2"),
            ],
        }

    @property
    def mlp(self) -> Any:
        """The column linears of the MLP."""
        return next((MLPS[name] for name in MLPS if is_one(getattr(self.first, "mlp", None), name)), "mlp.fc1")

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        return [
            self.heads(col=[segments("attn.qkv", 3)]),
            attribute("attn.num_heads", per_rank),
            attribute("attn.attn_dim", per_rank),
        ]

    def heads(self, *, col: Sequence[Any], **more: Any) -> Rule:
        """Return the region of an attention with these columns, and a gate if it has one."""
        attn = getattr(self.first, "attn", None)
        gate = ("attn.gate",) if getattr(attn, "gate", None) is not None else ()
        norms = [f"attn.{name}" for name in ("q_norm", "k_norm") if hasattr(attn, name)]
        return region(
            enter="attn",
            col=(*col, *gate),
            row="attn.proj",
            partial=tuple(norms),
            **{"heads": "attn.num_heads", **more},
        )

    def around(self) -> list[Rule]:
        """Return what a family has besides."""
        return []
