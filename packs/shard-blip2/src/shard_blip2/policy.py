"""How BLIP-2 is sharded without a language model: the parts of `shard_blip2.parts`, alone or together."""

from __future__ import annotations

from shard_blip2.parts import QFORMER, QFORMER_STAGES, TEXT, VISION, VISION_STAGES
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import replicate
from shardcore_transformers import PretrainedPolicy

#: From the tower of images to the Q-Former, which begins with the queries.
BETWEEN = ("vision_model.post_layernorm", "query_tokens", "qformer.layernorm", "qformer.dropout")
BLOCKS = ("vision_model.encoder.layers", "qformer.encoder.layer")


class Blip2VisionModelPolicy(PretrainedPolicy):
    """The tower of images alone."""

    stages = VISION_STAGES

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower."""
        return VISION


class Blip2QFormerModelPolicy(PretrainedPolicy):
    """The Q-Former alone.

    Its blocks take the queries out of the tokens, so tokens are not split between them (sequence parallelism).
    """

    stages = QFORMER_STAGES

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the Q-Former."""
        return QFORMER


class Blip2ForImageTextRetrievalPolicy(PretrainedPolicy):
    """Images and texts, compared with each other: whether they match, and how alike they are."""

    stages = Stages(
        first="vision_model.embeddings",
        blocks=BLOCKS,
        between=(*BETWEEN, "embeddings"),
        last=("vision_projection", "text_projection", "itm_head"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the parts and of what compares."""
        compared = replicate("query_tokens", "vision_projection", "text_projection", "itm_head")
        return {**VISION, **QFORMER, **TEXT, "Blip2ForImageTextRetrieval": [compared]}


class Blip2TextModelWithProjectionPolicy(PretrainedPolicy):
    """Text alone, projected to where it meets images; the queries are there and nothing reads them."""

    stages = Stages(
        first=("query_tokens", "embeddings", "qformer.layernorm", "qformer.dropout"),
        blocks="qformer.encoder.layer",
        last="text_projection",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the Q-Former, of text, and of the projection."""
        return {**QFORMER, **TEXT, "Blip2TextModelWithProjection": [replicate("query_tokens", "text_projection")]}


class Blip2VisionModelWithProjectionPolicy(PretrainedPolicy):
    """What the Q-Former learns of an image, projected to where it meets text."""

    stages = Stages(first="vision_model.embeddings", blocks=BLOCKS, between=BETWEEN, last="vision_projection")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of both parts, and of the projection."""
        projected = replicate("query_tokens", "vision_projection")
        return {**VISION, **QFORMER, "Blip2VisionModelWithProjection": [projected]}
