"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: By the module of transformers: what the names of its classes and of its policies begin with.
_FAMILIES = {
    "clip": ("CLIP", "policy:CLIP"),
    "siglip": ("Siglip", "siglip:Siglip"),
    "siglip2": ("Siglip2", "siglip:Siglip"),
}
#: What the name of a class ends with -> that of its policy.
_CLASSES = {
    "Model": "Policy",
    "TextModel": "TextPolicy",
    "VisionModel": "VisionPolicy",
    "ForImageClassification": "VisionPolicy",
}
_OF_CLIP = {"TextModelWithProjection": "TextPolicy", "VisionModelWithProjection": "VisionPolicy"}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve CLIP, SigLIP and SigLIP 2, each of their towers, and their heads."""
    return [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{name}",
            policy=f"shard_clip.{start}{policy}",
            requires="transformers>=5.10.0rc0" if family == "Siglip2" else None,  # its towers were wrapped once more
        )
        for module, (family, start) in _FAMILIES.items()
        for name, policy in {**_CLASSES, **(_OF_CLIP if family == "CLIP" else {})}.items()
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with towers of different sizes."""
    return ["shard_clip.cases:cases"]
