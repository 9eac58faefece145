"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_MODELS = "transformers.models.wav2vec2.modeling_wav2vec2"
_HEADS = (
    "Model",
    "ForPreTraining",
    "ForCTC",
    "ForSequenceClassification",
    "ForAudioFrameClassification",
    "ForXVector",
)


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve Wav2Vec2 and its heads."""
    specs = []
    for head in _HEADS:
        module = "policy" if head == "Model" else "heads"
        specs.append(
            PolicySpec(target=f"{_MODELS}.Wav2Vec2{head}", policy=f"shard_wav2vec2.{module}:Wav2Vec2{head}Policy")
        )
    return specs


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with norms of groups and of layers, before and behind attention."""
    return ["shard_wav2vec2.cases:cases"]
