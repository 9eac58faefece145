"""How GPT-NeoX is sharded: its blocks, and what each head adds.

One linear computes query, key and value of head after head, so any number of ranks share the heads: the attention reads
their number off what it is given.
"""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import head, norm, outputs, region, replicate, segments, sequence, vocab
from shardcore_transformers import PretrainedPolicy

#: The linear that scores words: its name today, and that of older releases of transformers.
_WORDS = ("lm_head", "embed_out")


class GPTNeoXModelPolicy(PretrainedPolicy):
    """GPT-NeoX without a head. Attention and MLP both read the tokens, or, as in GPT-2, one reads after the other."""

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("embed_in", "emb_dropout"), blocks="layers", last="final_layer_norm", everywhere="rotary_emb"
    )
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "GPTNeoXModel": [
                vocab("embed_in"),
                norm("final_layer_norm"),
                sequence(scatter="layers[0]", gather="final_layer_norm", attention="attention"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "GPTNeoXLayer": [
                norm("input_layernorm", "post_attention_layernorm"),
                region(
                    enter="attention",
                    col=segments("attention.query_key_value", 3, by="head"),
                    row="attention.dense",
                    unit="head",
                ),
                region(enter="mlp", col="mlp.dense_h_to_4h", row="mlp.dense_4h_to_h"),
            ],
            **self.rules,
        }


class GPTNeoXForCausalLMPolicy(GPTNeoXModelPolicy):
    """GPT-NeoX with its language-model head."""

    stages = GPTNeoXModelPolicy.stages.under("gpt_neox", then=_WORDS, optional=_WORDS)
    rules: ClassVar[ModulePolicy] = {"GPTNeoXForCausalLM": [head(*_WORDS, optional=True)]}


class GPTNeoXForSequenceClassificationPolicy(GPTNeoXModelPolicy):
    """GPT-NeoX with a label for each sequence."""

    stages = GPTNeoXModelPolicy.stages.under("gpt_neox", then="score")
    rules: ClassVar[ModulePolicy] = {"GPTNeoXForSequenceClassification": [replicate("score")]}


class GPTNeoXForTokenClassificationPolicy(GPTNeoXModelPolicy):
    """GPT-NeoX with a label for each token."""

    stages = GPTNeoXModelPolicy.stages.under("gpt_neox", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"GPTNeoXForTokenClassification": [replicate("classifier")]}


class GPTNeoXForQuestionAnsweringPolicy(GPTNeoXModelPolicy):
    """GPT-NeoX with start and end scores for each token."""

    stages = GPTNeoXModelPolicy.stages.under("gpt_neox", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"GPTNeoXForQuestionAnswering": [replicate("qa_outputs")]}
