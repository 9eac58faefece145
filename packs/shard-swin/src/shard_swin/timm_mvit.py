"""How timm's MViT v2 is sharded: stages with more heads each; queries, keys and values are pooled head by head."""

from __future__ import annotations

from typing import Any

from torch import nn

from shard_swin.stages import HeadsOfStages, shared
from shard_swin.timm_swin import RUNS
from shardcore.policy import ModulePolicy, Policy, Rule, Stages
from shardcore.styles import (
    attribute,
    calls,
    norm,
    partial,
    per_rank,
    refuse,
    region,
    replicate,
    segments,
    shared_rng,
)


def _pools_first(model: nn.Module) -> bool:
    return any(type(module).__name__ == "MultiScaleAttentionPoolFirst" for module in model.modules())


class MultiScaleVitPolicy(Policy):
    """Stages of attention over pooled tokens, with the class token or without."""

    checks = (HeadsOfStages("stages.*.blocks.0.attn.num_heads"),)
    stages = Stages(first=("patch_embed", "cls_token", "pos_embed"), blocks="stages", last=("norm", "head"))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the stages and of the head."""
        return {
            self.model: [
                refuse(_pools_first, "it pools before it projects (pool_first=True), which timm cannot run either"),
                replicate("patch_embed", "norm", "head"),
                replicate("cls_token", "pos_embed", optional=True),
                calls(*RUNS),
            ],
            **{block: self.block(block) for stage in self.model.stages for block in stage.blocks},
        }

    def block(self, block: Any) -> list[Rule]:
        """Return the rules of one block; what pools a head, and its positions, are those of all heads."""
        own = {name.partition(".")[0] for name, _ in block.attn.named_parameters()}
        of_all_heads = [f"attn.{name}" for name in sorted(own - {"qkv", "proj"})]
        return [
            norm("norm1", "norm2"),
            replicate("shortcut_proj_attn", "shortcut_proj_mlp", optional=True),
            shared(
                "attn.num_heads",
                region(enter="attn", col=segments("attn.qkv", 3), row="attn.proj", heads="attn.num_heads"),
                attribute("attn.num_heads", per_rank),
                attribute("attn.dim_out", per_rank),
                partial(*of_all_heads),
                whole="attn",
            ),
            region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
            shared_rng("drop_path1", "drop_path2"),
        ]
