"""How GPT-2 is sharded: what every class of its modules needs, and what each head adds.

Its linears are transformers' ``Conv1D``, whose weights are (in, out); words of policies take them as they take linears.
"""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    head,
    norm,
    outputs,
    per_rank,
    region,
    replicate,
    segments,
    sequence,
    vocab,
)
from shardcore_transformers import PretrainedPolicy


class GPT2ModelPolicy(PretrainedPolicy):
    """The decoder without a head; with ``add_cross_attention`` it attends to an encoder's states."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first=("wte", "wpe", "drop"), blocks="h", last="ln_f")
    #: Where tokens may be split.
    tokens: ClassVar[tuple[Rule, ...]] = (sequence(scatter="h[0]", gather="ln_f", attention="attn"),)
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "GPT2Model": [
                vocab("wte"),
                replicate("wpe"),
                norm("ln_f"),
                enter_arg("", "encoder_hidden_states"),
                *self.tokens,
                outputs(attentions="heads", cross_attentions="heads", hidden_states="sequence"),
            ],
            "GPT2Block": [
                norm("ln_1", "ln_2"),
                region(enter="attn", col=segments("attn.c_attn", 3), row="attn.c_proj", unit="head"),
                norm("ln_cross_attn", optional=True),
                region(
                    enter="crossattention",
                    col=("crossattention.q_attn", segments("crossattention.c_attn", 2)),
                    row="crossattention.c_proj",
                    unit="head",
                    optional=True,
                ),
                region(enter="mlp", col="mlp.c_fc", row="mlp.c_proj"),
            ],
            "GPT2Attention": [attribute("split_size", per_rank), attribute("num_heads", per_rank)],
            **self.rules,
        }


class GPT2LMHeadModelPolicy(GPT2ModelPolicy):
    """The next word."""

    stages = GPT2ModelPolicy.stages.under("transformer", then="lm_head")
    rules: ClassVar[ModulePolicy] = {"GPT2LMHeadModel": [head("lm_head")]}


class GPT2DoubleHeadsModelPolicy(GPT2ModelPolicy):
    """The next word, and which of several choices is right; its last hidden states have choices before tokens."""

    tokens = ()
    stages = GPT2ModelPolicy.stages.under("transformer", then=("lm_head", "multiple_choice_head"))
    rules: ClassVar[ModulePolicy] = {"GPT2DoubleHeadsModel": [head("lm_head"), replicate("multiple_choice_head")]}


class GPT2ForSequenceClassificationPolicy(GPT2ModelPolicy):
    """A label for each sequence."""

    stages = GPT2ModelPolicy.stages.under("transformer", then="score")
    rules: ClassVar[ModulePolicy] = {"GPT2ForSequenceClassification": [replicate("score")]}


class GPT2ForTokenClassificationPolicy(GPT2ModelPolicy):
    """A label for each token."""

    stages = GPT2ModelPolicy.stages.under("transformer", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"GPT2ForTokenClassification": [replicate("classifier")]}


class GPT2ForQuestionAnsweringPolicy(GPT2ModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = GPT2ModelPolicy.stages.under("transformer", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"GPT2ForQuestionAnswering": [replicate("qa_outputs")]}
