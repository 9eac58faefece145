"""How T5 is sharded: what encoder and decoder need; heads are in `shard_t5.heads`."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import attribute, by_heads, enter_arg, norm, outputs, per_rank, region, sequence, vocab
from shardcore_transformers import PretrainedPolicy

__all__ = ["T5EncoderModelPolicy", "T5ModelPolicy"]


class T5EncoderModelPolicy(PretrainedPolicy):
    """The encoder alone.

    The first block makes a bias of positions for the heads of the rank, and hands it on to the others.
    """

    #: What the names of the model's classes begin with.
    family: ClassVar[str] = "T5"
    #: The class that holds the embedding, and what is beside it there.
    holder: ClassVar[str] = "EncoderModel"
    beside: ClassVar[tuple[Rule, ...]] = ()
    checks = (Heads("num_heads"),)
    stages = Stages(first=("shared", "encoder.embed_tokens"), blocks="encoder.block", last="encoder.final_layer_norm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model and of its head."""
        return {
            f"{self.family}{self.holder}": [vocab("shared"), *self.beside],
            f"{self.family}Stack": [
                vocab("embed_tokens"),
                enter_arg("", "encoder_hidden_states"),
                norm("final_layer_norm", rms="variance_epsilon"),
                sequence(scatter="block[0]", gather="final_layer_norm"),
                outputs(attentions="heads", cross_attentions="heads", hidden_states="sequence"),
            ],
            f"{self.family}LayerSelfAttention": self.attention("SelfAttention"),
            f"{self.family}LayerFF": [norm("layer_norm", rms="variance_epsilon")],
            f"{self.family}DenseActDense": [region(enter="", col="wi", row="wo", optional=True)],
            f"{self.family}DenseGatedActDense": [region(enter="", col=("wi_0", "wi_1"), row="wo", optional=True)],
            **self.head(),
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

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {}


class T5ModelPolicy(T5EncoderModelPolicy):
    """Encoder and decoder."""

    holder: ClassVar[str] = "Model"
    stages = Stages(
        first=("shared", "encoder.embed_tokens"),
        blocks=("encoder.block", "decoder.block"),
        between=("encoder.final_layer_norm", "decoder.embed_tokens"),
        last="decoder.final_layer_norm",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, and those of the decoder's attention to it."""
        crossing = self.attention("EncDecAttention")
        return {**super().module_policy(), f"{self.family}LayerCrossAttention": crossing}
