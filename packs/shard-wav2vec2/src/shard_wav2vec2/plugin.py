"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_SPEECH = ("Model", "ForCTC", "ForSequenceClassification")
_FRAMES = (*_SPEECH, "ForAudioFrameClassification", "ForXVector")
#: By the module of transformers: what the names of its classes begin with, the policy, and the heads.
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "data2vec.modeling_data2vec_audio": ("Data2VecAudio", "policy:Wav2Vec2Policy", _FRAMES),
    "hubert.modeling_hubert": ("Hubert", "policy:Wav2Vec2Policy", _SPEECH),
    "unispeech.modeling_unispeech": ("UniSpeech", "policy:Wav2Vec2Policy", (*_SPEECH, "ForPreTraining")),
    "unispeech_sat.modeling_unispeech_sat": ("UniSpeechSat", "policy:Wav2Vec2Policy", (*_FRAMES, "ForPreTraining")),
    "wav2vec2.modeling_wav2vec2": ("Wav2Vec2", "policy:Wav2Vec2Policy", (*_FRAMES, "ForPreTraining")),
    "wavlm.modeling_wavlm": ("WavLM", "wavlm:WavLMPolicy", _FRAMES),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(target=f"transformers.models.{module}.{family}{head}", policy=f"shard_wav2vec2.{policy}")
        for module, (family, policy, heads) in _FAMILIES.items()
        for head in heads
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with norms of groups and of layers, before and behind attention."""
    return ["shard_wav2vec2.cases:cases"]
