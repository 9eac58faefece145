"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_WHISPER = "transformers.models.whisper.modeling_whisper"
_MOONSHINE = "transformers.models.moonshine.modeling_moonshine"
_MODELS = ("WhisperModel", "WhisperForConditionalGeneration", "WhisperForAudioClassification", "WhisperForCausalLM")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Whisper and its heads, and Moonshine."""
    return [
        *(PolicySpec(target=f"{_WHISPER}.{name}", policy="shard_whisper.policy:WhisperPolicy") for name in _MODELS),
        *(
            PolicySpec(target=f"{_MOONSHINE}.Moonshine{kind}", policy="shard_whisper.moonshine:MoonshinePolicy")
            for kind in ("Model", "ForConditionalGeneration")
        ),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_whisper.cases:cases", "shard_whisper.moonshine_cases:cases"]
