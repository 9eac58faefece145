"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_CLASSES = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
_REMOTE = ("Model", "ForConditionalGeneration")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve GLM and GLM-4 with their heads, and the remote code of ChatGLM2."""
    remote = [
        PolicySpec(target=f"transformers_modules.*.ChatGLM{name}", policy="shard_glm.chatglm:ChatGLMPolicy")
        for name in _REMOTE
    ]
    return remote + [
        PolicySpec(
            target=f"transformers.models.{family}.modeling_{family}.{family.title()}{name}",
            policy=f"shard_glm.policy:{family.title()}Policy",
        )
        for family in ("glm", "glm4")
        for name in _CLASSES
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which decoders differ."""
    return ["shard_glm.cases:cases", "shard_glm.chatglm_cases:cases"]
