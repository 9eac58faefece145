"""How GPT-2 is sharded: what every class of its modules needs.

Its linears are transformers' ``Conv1D``, whose weights are (in, out); words of policies take them as they take linears.
"""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    norm,
    outputs,
    per_rank,
    region,
    replicate,
    segments,
    sequence,
    vocab,
)
from shardcore_transformers import BaseModelPolicy


class GPT2Policy(BaseModelPolicy):
    """The decoder, with a head or without; with ``add_cross_attention`` it attends to an encoder's states."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first=("wte", "wpe", "drop"), blocks="h", last="ln_f")
    labels = ("score", "classifier", "qa_outputs", "multiple_choice_head")
    #: Where tokens may be split.
    tokens: ClassVar[tuple[Rule, ...]] = (sequence(scatter="h[0]", gather="ln_f", attention="attn"),)

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
            **self.heads(),
        }


class GPT2DoubleHeadsPolicy(GPT2Policy):
    """The next word, and which of several choices is right; its last hidden states have choices before tokens."""

    tokens = ()
