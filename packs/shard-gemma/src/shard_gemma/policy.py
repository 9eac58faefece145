"""How the Gemmas are sharded: like Llama, with norms around what Gemma 2 adds, and in Gemma 3 on queries and keys."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import (
    LlamaForCausalLMPolicy,
    LlamaForSequenceClassificationPolicy,
    LlamaForTokenClassificationPolicy,
    LlamaModelPolicy,
)
from shardcore.policy import Heads, ModulePolicy, Rule
from shardcore.styles import norm


class GemmaModelPolicy(LlamaModelPolicy):
    """The decoder of Gemma without a head; any number of ranks share its heads."""

    family: ClassVar[str] = "Gemma"
    rms: ClassVar[str | None] = None  # the norms multiply by 1 + weight
    checks = (Heads("num_attention_heads", kv="num_key_value_heads", uneven=True),)


class GemmaForCausalLMPolicy(GemmaModelPolicy, LlamaForCausalLMPolicy):
    """Gemma with its language-model head."""


class GemmaForSequenceClassificationPolicy(GemmaModelPolicy, LlamaForSequenceClassificationPolicy):
    """Gemma with a label for each sequence."""


class GemmaForTokenClassificationPolicy(GemmaModelPolicy, LlamaForTokenClassificationPolicy):
    """Gemma with a label for each token."""


class Gemma2ModelPolicy(GemmaModelPolicy):
    """The decoder of Gemma 2 without a head."""

    family: ClassVar[str] = "Gemma2"

    def block(self) -> list[Rule]:
        """Return the rules of one block, which has norms before and after its MLP."""
        return [*super().block(), norm("pre_feedforward_layernorm", "post_feedforward_layernorm")]


class Gemma2ForCausalLMPolicy(Gemma2ModelPolicy, LlamaForCausalLMPolicy):
    """Gemma 2 with its language-model head."""


class Gemma2ForSequenceClassificationPolicy(Gemma2ModelPolicy, LlamaForSequenceClassificationPolicy):
    """Gemma 2 with a label for each sequence."""


class Gemma2ForTokenClassificationPolicy(Gemma2ModelPolicy, LlamaForTokenClassificationPolicy):
    """Gemma 2 with a label for each token."""


class Gemma3TextModelPolicy(Gemma2ModelPolicy):
    """The decoder of Gemma 3 for text, without a head."""

    family: ClassVar[str] = "Gemma3"
    head_norms: ClassVar[tuple[str, ...]] = ("q_norm", "k_norm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head; two names say that they are for text."""
        return {_OF_TEXT.get(str(name), name): rules for name, rules in super().module_policy().items()}


_OF_TEXT = {f"Gemma3{name}": f"Gemma3Text{name}" for name in ("Model", "ForSequenceClassification")}


class Gemma3ForCausalLMPolicy(Gemma3TextModelPolicy, LlamaForCausalLMPolicy):
    """Gemma 3 with its language-model head."""


class Gemma3TextForSequenceClassificationPolicy(Gemma3TextModelPolicy, LlamaForSequenceClassificationPolicy):
    """Gemma 3 with a label for each sequence of text."""
