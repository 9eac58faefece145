"""How a masked autoencoder is sharded: a ViT sees the patches that are left, and a smaller one draws the others."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from shard_vit.policy import ViTPolicy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import norm, outputs, replicate, sequence


class ViTMAEForPreTrainingPolicy(ViTPolicy):
    """The encoder with the decoder of pixels, whose layers are the same and have heads of their own number."""

    labels = ()  # the decoder is split too

    @override
    def set_model(self, model: nn.Module) -> None:
        """Take the model, and say what its stages are."""
        super().set_model(model)
        self.stages = Stages(
            first="vit.embeddings",
            blocks=("vit.layers", "decoder.decoder_layers"),
            between=("vit.layernorm", "decoder.decoder_embed", "decoder.mask_token", "decoder.decoder_pos_embed"),
            last=("decoder.decoder_norm", "decoder.decoder_pred"),
        )

    @override
    def module_policy(self) -> ModulePolicy:
        decoder: list[Rule] = [
            replicate("decoder_embed", "mask_token", "decoder_pos_embed", "decoder_pred"),
            norm("decoder_norm"),
            sequence(scatter="decoder_layers[0]", gather="decoder_norm", attention="attention"),
            # It returns none of them; what is asked for is captured from the encoder.
            outputs(
                attentions="heads",
                hidden_states="sequence",
                heads="decoder_layers.0.attention.num_attention_heads",
            ),
        ]
        return {**super().module_policy(), "ViTMAEDecoder": decoder}
