"""How BLIP-2 with a language model is sharded: that is left to the pack for its class."""

from __future__ import annotations

from typing import ClassVar

from shard_blip2.parts import QFORMER, VISION
from shard_blip2.policy import BETWEEN, BLOCKS
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import calls, delegate, replicate
from shardcore_transformers import PretrainedPolicy


class Blip2ModelPolicy(PretrainedPolicy):
    """What the Q-Former learns of an image, and a language model, whichever it is, that goes on from there."""

    stages = Stages(
        first="vision_model.embeddings",
        blocks=(*BLOCKS, "language_model"),
        between=(*BETWEEN, "language_projection"),
    )

    #: The class that holds the parts, and the methods by which users run it.
    holder: ClassVar[str] = "Blip2Model"
    methods: ClassVar[tuple[str, ...]] = ("get_text_features", "get_image_features", "get_qformer_features")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of both parts, and of what is between them and the language model."""
        spoken = [replicate("query_tokens", "language_projection"), delegate("language_model")]
        return {**VISION, **QFORMER, self.holder: [*spoken, calls(*self.methods)]}


class Blip2ForConditionalGenerationPolicy(Blip2ModelPolicy):
    """The same, which generates."""

    holder = "Blip2ForConditionalGeneration"
    methods = ("get_image_features", "generate")
