"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: By the module of transformers: what the names of its classes begin with, the policy, the heads besides the language
#: model, and what it needs.
_LABELS = ("ForSequenceClassification",)
_TOKENS = (*_LABELS, "ForTokenClassification")
_NEW = "transformers>=5.17"
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...], str | None]] = {
    "axk1": ("AXK1", "AXK1Policy", _TOKENS, _NEW),
    "deepseek_v2": ("DeepseekV2", "DeepseekPolicy", _LABELS, "transformers>=5.0.0rc0"),
    "deepseek_v3": ("DeepseekV3", "DeepseekPolicy", _TOKENS, None),
    "deepseek_v32": ("DeepseekV32", "DeepseekV32Policy", (), _NEW),
    "glm4_moe_lite": ("Glm4MoeLite", "DeepseekPolicy", (), _NEW),
    "glm_moe_dsa": ("GlmMoeDsa", "DeepseekV32Policy", (), _NEW),
    "minicpm3": ("MiniCPM3", "DeepseekPolicy", _LABELS, _NEW),
    "mistral4": ("Mistral4", "DeepseekPolicy", _TOKENS, _NEW),
    "youtu": ("Youtu", "DeepseekPolicy", (), _NEW),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, and its heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_deepseek.policy:{policy}",
            requires=requires,
        )
        for module, (family, policy, heads, requires) in _FAMILIES.items()
        for head in ("Model", "ForCausalLM", *heads)
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with and without latent queries, blocks with an MLP and with experts."""
    return ["shard_deepseek.cases:cases"]
