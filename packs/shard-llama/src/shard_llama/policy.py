"""How Llama is sharded: what every class of its modules needs, and the heads."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Check, Heads, ModulePolicy, Rule, Stages
from shardcore.styles import attribute, local_groups, norm, outputs, region, sequence, vocab
from shardcore_transformers import BaseModelPolicy


class LlamaPolicy(BaseModelPolicy):
    """A decoder like Llama, with a head or without. Families that differ from it derive from it, and say in what."""

    #: The attribute of the norms with epsilon; None if they are none that can be fused.
    rms: ClassVar[str | None] = "variance_epsilon"
    #: The norms of a block, around its attention and its MLP.
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    #: The norm behind the blocks.
    final: ClassVar[str] = "norm"
    #: The linear at the end of the attention.
    output: ClassVar[str] = "o_proj"
    #: What a block calls its MLP, and its linears.
    mlp: ClassVar[str] = "mlp"
    columns: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    row: ClassVar[str] = "down_proj"
    #: What normalizes the queries and keys of each head, in the attention.
    head_norms: tuple[str, ...] = ()
    labels: ClassVar[tuple[str, ...]] = ("score", "qa_outputs")
    #: The attention that context parallelism may compute.
    context: ClassVar[str | tuple[str, ...]] = "self_attn"
    checks: ClassVar[tuple[Check, ...]] = (Heads("num_attention_heads", kv="num_key_value_heads"),)
    stages = Stages(first="embed_tokens", blocks="layers", last="norm", everywhere="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder, its blocks, and what makes labels or scores of what it returns."""
        return {self.base: self.decoder(), type(self.base.layers[0]): self.block(), **self.heads()}

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [
            vocab("embed_tokens"),
            norm(self.final, rms=self.rms),
            sequence(scatter="layers[0]", gather=self.final, attention=self.context),
            outputs(attentions="heads", hidden_states="sequence"),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of one block."""
        return [norm(*self.norms, rms=self.rms), *self.attention(), *self.feed_forward()]

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
        norms = tuple(f"self_attn.{name}" for name in self.head_norms)
        return [
            region(enter="self_attn", col=q, kv=(k, v), row=f"self_attn.{self.output}", unit="head", partial=norms),
            attribute("self_attn.num_key_value_groups", local_groups),
        ]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        columns = tuple(f"{self.mlp}.{name}" for name in self.columns)
        return [region(enter=self.mlp, col=columns, row=f"{self.mlp}.{self.row}")]
