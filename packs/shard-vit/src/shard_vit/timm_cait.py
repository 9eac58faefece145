"""How timm's CaiT is sharded: patches attend with heads that talk to each other, then the class token attends to them.

What mixes the scores of all heads would have to send them, twelve times the tokens at 577 patches: every rank computes
that attention whole, and the MLPs and the attention of the class token are split.
"""

from __future__ import annotations

from shard_vit.timm_attention import ClassAttention
from shard_vit.timm_policy import RUNS
from shardcore.policy import ModulePolicy, Policy, Rule, Stages, Word
from shardcore.styles import attribute, calls, norm, per_rank, region, replicate, shared_rng


class CaitPolicy(Policy):
    """Blocks of patches, and blocks in which the class token alone is computed."""

    stages = Stages(
        first=("patch_embed", "pos_embed"),
        blocks=("blocks", "blocks_token_only"),
        between="cls_token",
        last=("norm", "head"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of both kinds of blocks."""
        return {
            self.model: [
                replicate("patch_embed", "pos_embed", "cls_token", "norm", "head"),
                calls(*RUNS, "forward_cls"),
            ],
            "LayerScaleBlock": [replicate("attn"), *self.block()],
            "LayerScaleBlockClassAttn": [
                region(enter="attn", col=("attn.q", "attn.k", "attn.v"), row="attn.proj", heads="attn.num_heads"),
                attribute("attn.num_heads", per_rank),
                Word(text="attends()", planned=lambda scope: scope.swap("attn", ClassAttention)),
                *self.block(),
            ],
        }

    def block(self) -> list[Rule]:
        """Return the rules of what both kinds have."""
        return [
            norm("norm1", "norm2"),
            region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
            replicate("gamma_1", "gamma_2"),
            shared_rng("drop_path"),
        ]
