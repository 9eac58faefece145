"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_CLASSES = {
    "V2": ("Model", "ForCausalLM", "ForSequenceClassification"),
    "V3": ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"),
}
_REQUIRES = {"V2": "transformers>=5.0.0rc0"}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DeepSeek-V2 and DeepSeek-V3, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.deepseek_{version.lower()}.modeling_deepseek_{version.lower()}"
            f".Deepseek{version}{name}",
            policy="shard_deepseek.policy:DeepseekPolicy",
            requires=_REQUIRES.get(version),
        )
        for version, names in _CLASSES.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with and without latent queries, blocks with an MLP and with experts."""
    return ["shard_deepseek.cases:cases"]
