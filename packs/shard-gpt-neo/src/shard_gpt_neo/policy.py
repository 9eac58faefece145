"""How GPT-Neo and GPT-J are sharded: the blocks of each."""

from __future__ import annotations

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import attribute, norm, outputs, per_rank, region, replicate, sequence, vocab
from shardcore_transformers import BaseModelPolicy

_CAPTURED = outputs(attentions="heads", hidden_states="sequence")


class GPTNeoPolicy(BaseModelPolicy):
    """GPT-Neo, with a head or without."""

    checks = (Heads("num_heads"),)
    stages = Stages(first=("wte", "wpe"), blocks="h", last="ln_f")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "GPTNeoModel": [
                vocab("wte"),
                replicate("wpe"),
                norm("ln_f"),
                sequence(scatter="h[0]", gather="ln_f"),
                _CAPTURED,
            ],
            "GPTNeoBlock": [
                norm("ln_1", "ln_2"),
                region(
                    enter="attn.attention",
                    col=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
                    row="attn.attention.out_proj",
                    unit="head",
                ),
                attribute("attn.attention.num_heads", per_rank),
                region(enter="mlp", col="mlp.c_fc", row="mlp.c_proj"),
            ],
            **self.heads(),
        }


class GPTJPolicy(BaseModelPolicy):
    """GPT-J, with a head or without: attention and MLP read the same normalized tokens."""

    checks = (Heads("n_head"),)
    # Blocks share the positions since transformers 5.24; before, each has its own.
    stages = Stages(first="wte", blocks="h", last="ln_f", everywhere="rotary_emb", optional="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "GPTJModel": [
                vocab("wte"),
                norm("ln_f"),
                sequence(scatter="h[0]", gather="ln_f", attention="attn"),
                _CAPTURED,
            ],
            "GPTJBlock": [
                norm("ln_1"),
                region(
                    enter="attn",
                    col=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
                    row="attn.out_proj",
                    unit="head",
                ),
                attribute("attn.num_attention_heads", per_rank),
                region(enter="mlp", col="mlp.fc_in", row="mlp.fc_out"),
            ],
            **self.heads(),
        }
