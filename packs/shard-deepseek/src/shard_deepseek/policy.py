"""How decoders with the latent attention of DeepSeek are sharded, with experts in all but the first blocks or none."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.mixtures import MixturePolicy
from shardcore.policy import Heads, Rule
from shardcore.styles import enter_arg, experts, norm, outputs, partial, region, replicate, vocab


class DeepseekPolicy(MixturePolicy):
    """DeepSeek-V2, DeepSeek-V3 and DeepSeek-R1; any number of ranks share their heads."""

    shared: ClassVar[str | None] = "shared_experts"
    checks = (Heads("num_attention_heads", uneven=True),)

    def attention(self) -> list[Rule]:
        """Return the rules of the latent attention: what replicated linears make of the tokens enters.

        The latent states become keys and values of this rank's heads, and the rotary key beside them is that of all
        heads. Queries come from latent states of their own, or from the tokens.
        """
        latent = self.model.config.q_lora_rank is not None
        first, queries = ("q_a_proj", "q_b_proj") if latent else ("q_proj", "q_proj")
        whole = ("kv_a_proj_with_mqa", *(["q_a_proj"] if latent else []))
        norms = ("kv_a_layernorm", *(["q_a_layernorm"] if latent else []))
        return [
            region(
                enter=_below("self_attn", first, "kv_a_proj_with_mqa"),
                col=_below("self_attn", queries, "kv_b_proj"),
                row="self_attn.o_proj",
                unit="head",
                partial=_below("self_attn", *norms),
            ),
            replicate(*_below("self_attn", *whole)),
        ]


class DeepseekV32Policy(DeepseekPolicy):
    """DeepSeek-V3.2 and GLM-5: what selects the tokens that each one sees is whole on every rank, and reads all tokens.

    So the attention enters as one, and what makes the latent states sums its gradients.
    """

    context: ClassVar[str | tuple[str, ...]] = ()

    def attention(self) -> list[Rule]:
        """Return the rules of the latent attention; a layer may use the selection of the one before it."""
        latent = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
        return [
            region(
                enter="self_attn",
                col=_below("self_attn", "q_b_proj", "kv_b_proj"),
                row="self_attn.o_proj",
                unit="head",
                partial=_below("self_attn", *latent),
            ),
            partial(*_below("self_attn.indexer", "wq_b", "wk", "k_norm", "weights_proj"), optional=True),
        ]


class AXK1Policy(DeepseekPolicy):
    """A.X K1: normalizes what its experts return, with the one that every token visits, before the residual.

    That norm reads sums, so that one and the others are regions of their own. Experts are given tokens as rows, which
    are not split.
    """

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [vocab("embed_tokens"), norm(self.final, rms=self.rms), outputs(attentions="heads")]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        mlps = ("mlp", "mlp.shared_experts")
        return [
            *(
                region(enter=mlp, col=_below(mlp, *self.columns), row=f"{mlp}.{self.row}", optional=True)
                for mlp in mlps
            ),
            replicate("mlp.gate", optional=True),
            enter_arg("mlp.experts", "top_k_weights", optional=True),
            experts("mlp.experts", weights="", router=None, optional=True),
            norm("mlp.post_mlp_layernorm", rms=self.rms, optional=True),
        ]


def _below(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)
