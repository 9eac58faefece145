"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: The classes of a family, by its module and the module of its policies.
_MODELS = {
    ("clip.modeling_clip", "policy"): (
        "CLIPModel",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "CLIPVisionModel",
        "CLIPVisionModelWithProjection",
        "CLIPForImageClassification",
    ),
    ("siglip.modeling_siglip", "siglip"): (
        "SiglipModel",
        "SiglipTextModel",
        "SiglipVisionModel",
        "SiglipForImageClassification",
    ),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve CLIP and SigLIP, each of their towers, and their heads."""
    return [
        PolicySpec(target=f"transformers.models.{library}.{name}", policy=f"shard_clip.{module}:{name}Policy")
        for (library, module), names in _MODELS.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with towers of different sizes."""
    return ["shard_clip.cases:cases"]
