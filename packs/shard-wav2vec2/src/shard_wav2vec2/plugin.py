"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_SPEECH = ("Model", "ForCTC", "ForSequenceClassification")
_NEW = "transformers>=5.17.0rc0"
_FRAMES = (*_SPEECH, "ForAudioFrameClassification", "ForXVector")
#: By the module of transformers: what the names of its classes begin with, the policy, and the heads.
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "data2vec.modeling_data2vec_audio": ("Data2VecAudio", "policy:Wav2Vec2Policy", _FRAMES),
    "hubert.modeling_hubert": ("Hubert", "policy:Wav2Vec2Policy", _SPEECH),
    "parakeet.modeling_parakeet": (
        "Parakeet",
        "parakeet:ParakeetPolicy",
        ("Encoder", "ForCTC", "ForRNNT", "ForTDT"),
    ),
    "sew.modeling_sew": ("SEW", "sew:SEWPolicy", _SPEECH),
    "unispeech.modeling_unispeech": ("UniSpeech", "policy:Wav2Vec2Policy", (*_SPEECH, "ForPreTraining")),
    "unispeech_sat.modeling_unispeech_sat": ("UniSpeechSat", "policy:Wav2Vec2Policy", (*_FRAMES, "ForPreTraining")),
    "wav2vec2.modeling_wav2vec2": ("Wav2Vec2", "policy:Wav2Vec2Policy", (*_FRAMES, "ForPreTraining")),
    "wav2vec2_bert.modeling_wav2vec2_bert": ("Wav2Vec2Bert", "bert:Wav2Vec2BertPolicy", _FRAMES),
    "wav2vec2_conformer.modeling_wav2vec2_conformer": (
        "Wav2Vec2Conformer",
        "conformer:Wav2Vec2ConformerPolicy",
        (*_FRAMES, "ForPreTraining"),
    ),
    "wavlm.modeling_wavlm": ("WavLM", "wavlm:WavLMPolicy", _FRAMES),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.{family}{head}",
            policy=f"shard_wav2vec2.{policy}",
            requires=_NEW if family == "Parakeet" else None,  # classes that generate did not do it as others do
        )
        for module, (family, policy, heads) in _FAMILIES.items()
        for head in heads
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with norms of groups and of layers, before and behind attention."""
    return ["shard_wav2vec2.cases:cases", "shard_wav2vec2.parakeet_cases:cases"]
