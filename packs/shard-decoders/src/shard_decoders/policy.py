"""How decoders that are built like Llama are sharded: what differs in each family, and nothing else."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shardcore.policy import Rule
from shardcore.styles import by_heads, norm, norm_over_heads, region

_BOTH_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


class ApertusPolicy(LlamaPolicy):
    """Apertus: the activation of its MLP is learned."""

    norms: ClassVar[tuple[str, ...]] = ("attention_layernorm", "feedforward_layernorm")
    head_norms = ("q_norm", "k_norm")

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        return [region(enter="mlp", col="mlp.up_proj", row="mlp.down_proj", partial="mlp.act_fn")]


class ArceePolicy(LlamaPolicy):
    """Arcee: its MLP has no gate."""

    columns: ClassVar[tuple[str, ...]] = ("up_proj",)


class Cohere2Policy(LlamaPolicy):
    """Cohere 2 (Command R7B, Command A, Aya): attention and MLP read the same normalized tokens."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm",)
    rms: ClassVar[str | None] = None  # the norms subtract the mean


class CoherePolicy(Cohere2Policy):
    """Cohere (Command R): Cohere 2, but that each head may have norms of queries and keys of its own."""

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        return [*super().attention(), by_heads("self_attn.q_norm", "self_attn.k_norm", optional=True)]


class Exaone4Policy(LlamaPolicy):
    """EXAONE 4: normalizes what attention and MLP return."""

    norms: ClassVar[tuple[str, ...]] = _BOTH_AFTER
    head_norms = ("q_norm", "k_norm")


class HunYuanDenseV1Policy(LlamaPolicy):
    """Hunyuan, without experts."""

    head_norms = ("query_layernorm", "key_layernorm")


class HyperCLOVAXPolicy(LlamaPolicy):
    """HyperCLOVA X: may normalize what attention and MLP return, too."""

    def block(self) -> list[Rule]:
        """Return the rules of one block."""
        return [*super().block(), norm("post_norm1", "post_norm2", rms=self.rms, optional=True)]


class NemotronPolicy(LlamaPolicy):
    """Nemotron, whose norms multiply by 1 + weight, and Jais 2, whose subtract the mean; their MLPs have no gate."""

    rms: ClassVar[str | None] = None
    columns: ClassVar[tuple[str, ...]] = ("up_proj",)


class OlmoPolicy(LlamaPolicy):
    """OLMo: its norms have no parameters."""

    rms: ClassVar[str | None] = None


class Olmo2Policy(LlamaPolicy):
    """OLMo 2: normalizes what attention and MLP return, and queries and keys over the features of all heads."""

    norms: ClassVar[tuple[str, ...]] = _BOTH_AFTER

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        queries = norm_over_heads("self_attn.q_norm", rms="variance_epsilon")
        keys = norm_over_heads("self_attn.k_norm", rms="variance_epsilon", of="key")
        return [*super().attention(), queries, keys]


class Starcoder2Policy(LlamaPolicy):
    """StarCoder 2: plain norms, and an MLP as in GPT-2."""

    rms: ClassVar[str | None] = None
    columns: ClassVar[tuple[str, ...]] = ("c_fc",)
    row: ClassVar[str] = "c_proj"
