"""How timm's vision transformers are sharded: all plain models of ``vision_transformer.py``, DeiT included."""

from __future__ import annotations

from shard_vit.timm_kinds import MLPS, REFUSALS, is_one
from shardcore.policy import ModulePolicy, Policy, Stages
from shardcore.styles import (
    attribute,
    calls,
    norm,
    per_rank,
    region,
    replicate,
    segments,
    sequence,
    shared_rng,
)


class VisionTransformerPolicy(Policy):
    """Vision transformers with any pooling, register tokens, LayerScale and norms on queries and keys."""

    stages = Stages(
        first=("patch_embed", "cls_token", "reg_token", "dist_token", "pos_embed", "norm_pre"),
        blocks="blocks",
        last=("norm", "attn_pool", "fc_norm", "head", "head_dist"),
        optional=("dist_token", "head_dist"),  # DeiT's own
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules for the blocks and MLPs that this model has."""
        first = next(iter(self.model.blocks.children()))
        mlp = next((MLPS[name] for name in MLPS if is_one(getattr(first, "mlp", None), name)), "mlp.fc1")
        block = [
            norm("norm1", "norm2"),
            region(
                enter="attn",
                col=segments("attn.qkv", 3),
                row="attn.proj",
                heads="attn.num_heads",
                partial=("attn.q_norm", "attn.k_norm"),
            ),
            attribute("attn.num_heads", per_rank),
            attribute("attn.attn_dim", per_rank),
            region(enter="mlp", col=mlp, row="mlp.fc2"),
            replicate("ls1", "ls2", optional=True),
            shared_rng("drop_path1", "drop_path2"),
        ]
        return {
            "VisionTransformer": [
                *REFUSALS,
                replicate("cls_token", "reg_token", "dist_token", "pos_embed", "attn_pool", "head_dist", optional=True),
                replicate("patch_embed", "norm_pre", "norm", "fc_norm", "head"),
                sequence(scatter="blocks[0]", gather="norm"),
                calls("forward_features", "forward_head", "forward_intermediates", "get_intermediate_layers"),
            ],
            "ResPostBlock" if is_one(first, "ResPostBlock") else "Block": block,
        }
