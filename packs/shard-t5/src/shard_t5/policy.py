"""How T5 is sharded, and mT5 and umT5, whose classes have other names: what every class of its modules needs."""

from __future__ import annotations

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    by_heads,
    enter_arg,
    head,
    norm,
    outputs,
    per_rank,
    region,
    replicate,
    sequence,
    vocab,
)
from shardcore_transformers import BaseModelPolicy


class T5Policy(BaseModelPolicy):
    """Encoder and decoder, or the encoder alone, with a head or without.

    The first block makes a bias of positions for the heads of the rank, and hands it on to the others; in umT5 every
    block makes its own.
    """

    checks = (Heads("num_heads"),)
    labels = ("qa_outputs", "classifier", "classification_head.dense", "classification_head.out_proj")
    stages = Stages(
        first=("shared", "encoder.embed_tokens"),
        blocks=("encoder.block", "decoder.block"),
        between=("encoder.final_layer_norm", "decoder.embed_tokens"),
        last=("decoder.final_layer_norm", "lm_head", "qa_outputs"),
        optional=("lm_head", "qa_outputs"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of encoder and decoder, and of the head."""
        family = type(self.base.encoder).__name__.removesuffix("Stack")
        crossing: ModulePolicy = {f"{family}LayerCrossAttention": self.attention("EncDecAttention")}
        return {
            self.base: [vocab("shared"), head("lm_head", optional=True), replicate("qa_outputs", optional=True)],
            f"{family}Stack": [
                vocab("embed_tokens"),
                enter_arg("", "encoder_hidden_states"),
                norm("final_layer_norm", rms="variance_epsilon"),
                sequence(scatter="block[0]", gather="final_layer_norm"),
                outputs(attentions="heads", cross_attentions="heads", hidden_states="sequence"),
            ],
            f"{family}LayerSelfAttention": self.attention("SelfAttention"),
            **(crossing if hasattr(self.base, "decoder") else {}),
            f"{family}LayerFF": [norm("layer_norm", rms="variance_epsilon")],
            f"{family}DenseActDense": [region(enter="", col="wi", row="wo", optional=True)],
            f"{family}DenseGatedActDense": [region(enter="", col=("wi_0", "wi_1"), row="wo", optional=True)],
            **self.heads(),
        }

    def attention(self, name: str) -> list[Rule]:
        """Return the rules of one attention and of the norm before it."""
        return [
            norm("layer_norm", rms="variance_epsilon"),
            region(
                enter=name,
                col=(f"{name}.q", f"{name}.k", f"{name}.v"),
                row=f"{name}.o",
                unit="head",
            ),
            by_heads(f"{name}.relative_attention_bias", dim=1, optional=True),
            attribute(f"{name}.n_heads", per_rank),
            attribute(f"{name}.inner_dim", per_rank),
        ]
