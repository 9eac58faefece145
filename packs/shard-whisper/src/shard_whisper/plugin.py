"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_WHISPER = "transformers.models.whisper.modeling_whisper"
_MODELS = ("WhisperModel", "WhisperForConditionalGeneration", "WhisperForAudioClassification", "WhisperForCausalLM")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Whisper and its heads."""
    return [PolicySpec(target=f"{_WHISPER}.{name}", policy="shard_whisper.policy:WhisperPolicy") for name in _MODELS]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_whisper.cases:cases"]
