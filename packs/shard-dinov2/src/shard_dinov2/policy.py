"""How DINOv2 is sharded, with registers and without."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.dinov2 import modeling_dinov2
from typing_extensions import override

from shard_dinov2 import early
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import norm, outputs, region, replicate, sequence, shared_rng
from shardcore_transformers import BaseModelPolicy

#: In early releases of transformers blocks of DINOv2 have other names.
IS_EARLY = hasattr(modeling_dinov2, "Dinov2SelfAttention")

SPLIT: list[Rule] = [
    region(
        enter="attention",
        col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        row="attention.o_proj",
        unit="head",
    )
]
GATED = region(enter="mlp", col=("mlp.gate_proj", "mlp.up_proj"), row="mlp.down_proj", optional=True)


class Dinov2Policy(BaseModelPolicy):
    """The encoder with a head or without; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(first="embeddings", blocks="encoder.layer", last="layernorm")
    #: The list of blocks, and the norm behind them.
    blocks: ClassVar[str] = "encoder.layer"
    final: ClassVar[str] = "layernorm"
    #: The attention that context parallelism may compute.
    divided: ClassVar[str | tuple[str, ...]] = "attention"

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head."""
        return {
            self.base.embeddings: [replicate("")],
            type(self.base.get_submodule(f"{self.blocks}.0")): self.block(),
            self.base: self.encoder(),
            **self.heads(),
        }

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [
            norm(self.final),
            sequence(scatter=f"{self.blocks}[0]", gather=self.final, attention=self.divided),
            outputs(attentions="heads", hidden_states="sequence"),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of one block, which has one kind of MLP or the other."""
        return [
            norm("norm1", "norm2"),
            *self.attention(),
            *self.mlp(),
            replicate("layer_scale1", "layer_scale2"),
            shared_rng("drop_path"),
        ]

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        return early.ATTENTION if IS_EARLY else SPLIT

    def mlp(self) -> list[Rule]:
        """Return the rules of the MLP of a block."""
        plain = region(enter="mlp", col="mlp.fc1", row="mlp.fc2", optional=True)
        return [plain, early.GATED if IS_EARLY else GATED]


class Dinov2BackbonePolicy(Dinov2Policy):
    """The encoder as a backbone, which reads the states of every block by itself: its tokens stay whole."""

    @override
    def encoder(self) -> list[Rule]:
        return [norm(self.final), outputs(attentions="heads")]
