"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: The classes, by the module of their policies.
_MODELS = {
    "language": ("Blip2Model", "Blip2ForConditionalGeneration"),
    "policy": (
        "Blip2ForImageTextRetrieval",
        "Blip2TextModelWithProjection",
        "Blip2VisionModelWithProjection",
        "Blip2QFormerModel",
        "Blip2VisionModel",
    ),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve BLIP-2, its parts, and what is made of two of them."""
    library = "transformers.models.blip_2.modeling_blip_2"
    return [
        PolicySpec(target=f"{library}.{name}", policy=f"shard_blip2.{module}:{name}Policy")
        for module, names in _MODELS.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with OPT and with T5 as its language model."""
    return ["shard_blip2.cases:cases"]
