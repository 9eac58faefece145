"""What each head of Wav2Vec2 adds to the model."""

from __future__ import annotations

from typing import ClassVar

from shard_wav2vec2.policy import Wav2Vec2ModelPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import replicate

__all__ = [
    "Wav2Vec2ForAudioFrameClassificationPolicy",
    "Wav2Vec2ForCTCPolicy",
    "Wav2Vec2ForPreTrainingPolicy",
    "Wav2Vec2ForSequenceClassificationPolicy",
    "Wav2Vec2ForXVectorPolicy",
]

_MODEL = Wav2Vec2ModelPolicy.stages


class Wav2Vec2ForPreTrainingPolicy(Wav2Vec2ModelPolicy):
    """Masked frames, told from others by vectors of a codebook."""

    stages = _MODEL.under("wav2vec2", then=("quantizer", "project_hid", "project_q"))
    rules: ClassVar[ModulePolicy] = {"Wav2Vec2ForPreTraining": [replicate("quantizer", "project_hid", "project_q")]}


class Wav2Vec2ForCTCPolicy(Wav2Vec2ModelPolicy):
    """Speech to letters, which are few: every rank has the head."""

    stages = _MODEL.under("wav2vec2", then="lm_head")
    rules: ClassVar[ModulePolicy] = {"Wav2Vec2ForCTC": [replicate("lm_head")]}


class Wav2Vec2ForSequenceClassificationPolicy(Wav2Vec2ModelPolicy):
    """A label for each recording."""

    stages = _MODEL.under("wav2vec2", then=("layer_weights", "projector", "classifier"), optional="layer_weights")
    rules: ClassVar[ModulePolicy] = {
        "Wav2Vec2ForSequenceClassification": [
            replicate("projector", "classifier"),
            replicate("layer_weights", optional=True),
        ]
    }


class Wav2Vec2ForAudioFrameClassificationPolicy(Wav2Vec2ModelPolicy):
    """Labels for each frame."""

    stages = _MODEL.under("wav2vec2", then=("layer_weights", "classifier"), optional="layer_weights")
    rules: ClassVar[ModulePolicy] = {
        "Wav2Vec2ForAudioFrameClassification": [replicate("classifier"), replicate("layer_weights", optional=True)]
    }


class Wav2Vec2ForXVectorPolicy(Wav2Vec2ModelPolicy):
    """A vector of the voice for each recording."""

    stages = _MODEL.under(
        "wav2vec2",
        then=("layer_weights", "projector", "tdnn", "feature_extractor", "classifier", "objective"),
        optional="layer_weights",
    )
    rules: ClassVar[ModulePolicy] = {
        "Wav2Vec2ForXVector": [
            replicate("projector", "tdnn", "feature_extractor", "classifier", "objective"),
            replicate("layer_weights", optional=True),
        ]
    }
