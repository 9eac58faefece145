"""How Wav2Vec2 is sharded, and encoders of speech that are built like it: convolutions are whole, blocks are split."""

from __future__ import annotations

from typing import ClassVar

from shard_wav2vec2.layerdrop import layer_drop_of_config
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import attribute, local_heads, norm, outputs, region, replicate, sequence, shared_numpy
from shardcore_transformers import BaseModelPolicy


class Wav2Vec2Policy(BaseModelPolicy):
    """The model with a head or without; any number of ranks share its heads.

    Its norms lie before attention and behind the last layer (``do_stable_layer_norm``), or the other way round.
    """

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("feature_extractor", "feature_projection", "masked_spec_embed", "encoder.pos_conv_embed"),
        blocks="encoder.layers",
        last="adapter",
        everywhere="encoder.layer_norm",
        optional=("masked_spec_embed", "adapter"),
    )

    #: The attention that context parallelism may compute.
    divided: ClassVar[str | tuple[str, ...]] = "attention"
    #: What makes features of sound, in front of the encoder; not all models have all of it.
    front: ClassVar[tuple[str, ...]] = ("feature_extractor", "feature_projection", "masked_spec_embed")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model and of its head."""
        encoder = self.base.encoder
        return {
            self.base: [
                replicate(*self.front, optional=True),
                shared_numpy("_mask_hidden_states"),
                self.captured(),
            ],
            encoder: self.encoder(),
            type(encoder.layers[0]): [*self.attention(), *self.block()],
            **({} if getattr(self.base, "adapter", None) is None else self.adapter()),
            **self.heads(),
        }

    def adapter(self) -> ModulePolicy:
        """Return the rules of the convolutions that follow the encoder: each may be left out, on all ranks."""
        return {self.base.adapter: [replicate(""), shared_numpy("forward")]}

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        config = self.model.config
        # A sum of the states of all layers is taken where each rank has those of its own tokens.
        attention = () if config.use_weighted_layer_sum else self.divided
        end = "layer_norm" if getattr(config, "do_stable_layer_norm", False) else "layers[-1]"
        return [
            replicate("pos_conv_embed"),
            norm("layer_norm"),
            layer_drop_of_config("layerdrop"),
            sequence(scatter="layers[0]", gather=end, attention=attention),
        ]

    def captured(self) -> Rule:
        """Return the rule for what the model returns of its blocks."""
        return outputs(attentions="heads", hidden_states="sequence")

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        return [
            region(
                enter="attention",
                col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
                row="attention.out_proj",
                unit="head",
            ),
            attribute("attention.num_heads", local_heads),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of what else is in a block."""
        return [
            norm("layer_norm", "final_layer_norm"),
            region(enter="feed_forward", col="feed_forward.intermediate_dense", row="feed_forward.output_dense"),
            replicate("adapter_layer", optional=True),
        ]

    def heads(self) -> ModulePolicy:
        """Return the rules of what is behind the model: all of it is whole on every rank."""
        own = [name for name in (*self.model._modules, *self.model._parameters) if name != self.inside]
        return {self.model: [replicate(*own, optional=True)]} if self.inside else {}
