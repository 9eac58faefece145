"""How Llama is sharded: what every class of its modules needs, and what each head adds."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import attribute, head, local_groups, norm, outputs, region, replicate, sequence, vocab
from shardcore_transformers import PretrainedPolicy


class LlamaModelPolicy(PretrainedPolicy):
    """The decoder without a head. Packs of decoders that are built like Llama derive from it, and say what differs."""

    #: What the names of the model's classes begin with.
    family: ClassVar[str] = "Llama"
    #: The attribute of the norms with epsilon; None if they are none that can be fused.
    rms: ClassVar[str | None] = "variance_epsilon"
    #: The norm behind the blocks.
    final: ClassVar[str] = "norm"
    #: What normalizes the queries and keys of each head, in the attention.
    head_norms: ClassVar[tuple[str, ...]] = ()
    checks = (Heads("num_attention_heads", kv="num_key_value_heads"),)
    stages = Stages(first="embed_tokens", blocks="layers", last="norm", everywhere="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder."""
        return {f"{self.family}Model": self.decoder(), f"{self.family}DecoderLayer": self.block()}

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [
            vocab("embed_tokens"),
            norm(self.final, rms=self.rms),
            sequence(scatter="layers[0]", gather=self.final, attention="self_attn"),
            outputs(attentions="heads", hidden_states="sequence"),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of one block."""
        norms = norm("input_layernorm", "post_attention_layernorm", rms=self.rms)
        return [norms, *self.attention(), *self.feed_forward()]

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
        norms = tuple(f"self_attn.{name}" for name in self.head_norms)
        return [
            region(enter="self_attn", col=q, kv=(k, v), row="self_attn.o_proj", unit="head", partial=norms),
            attribute("self_attn.num_key_value_groups", local_groups),
        ]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        return [region(enter="mlp", col=("mlp.gate_proj", "mlp.up_proj"), row="mlp.down_proj")]


class LlamaForCausalLMPolicy(LlamaModelPolicy):
    """The decoder with its language-model head, tied to the embedding or not."""

    stages = LlamaModelPolicy.stages.under("model", then="lm_head")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and the head."""
        return {**super().module_policy(), f"{self.family}ForCausalLM": [head("lm_head")]}


class LlamaForSequenceClassificationPolicy(LlamaModelPolicy):
    """The decoder with a label for each sequence."""

    stages = LlamaModelPolicy.stages.under("model", then="score")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and the classifier."""
        return {**super().module_policy(), f"{self.family}ForSequenceClassification": [replicate("score")]}


class LlamaForTokenClassificationPolicy(LlamaModelPolicy):
    """The decoder with a label for each token."""

    stages = LlamaModelPolicy.stages.under("model", then=("dropout", "score"))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and the classifier."""
        return {**super().module_policy(), f"{self.family}ForTokenClassification": [replicate("score")]}


class LlamaForQuestionAnsweringPolicy(LlamaModelPolicy):
    """The decoder with start and end scores for each token."""

    stages = LlamaModelPolicy.stages.under("transformer", then="qa_outputs")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and the span head."""
        return {**super().module_policy(), f"{self.family}ForQuestionAnswering": [replicate("qa_outputs")]}
