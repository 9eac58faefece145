"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_ALL = ("Model", "ForImageClassification", "Backbone")
#: By the module of transformers: what the names of its classes and of its policies begin with, and what they end with.
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "dinov2": ("Dinov2", "policy:Dinov2", _ALL),
    "dinov2_with_registers": ("Dinov2WithRegisters", "policy:Dinov2", _ALL),
    "dinov3_vit": ("DINOv3ViT", "third:DINOv3ViT", ("Model", "Backbone")),
}
#: What estimates depth from the features of a backbone.
_DEPTH = {"depth_anything": "DepthAnything", "prompt_depth_anything": "PromptDepthAnything"}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DINOv2 with registers and without, DINOv3, their classifiers and their backbones, and Depth Anything."""
    backbones = [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}{head}",
            policy=f"shard_dinov2.{policy}{'Backbone' if head == 'Backbone' else ''}Policy",
            requires="transformers>=5.10.0rc0" if module == "dinov3_vit" else None,  # its blocks had another place
        )
        for module, (family, policy, heads) in _FAMILIES.items()
        for head in heads
    ]
    depth = [
        PolicySpec(
            target=f"transformers.models.{module}.modeling_{module}.{family}ForDepthEstimation",
            policy="shard_dinov2.depth:DepthAnythingPolicy",
        )
        for module, family in _DEPTH.items()
    ]
    return backbones + depth


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, both kinds of MLP, masked patches, and both kinds of depth."""
    return ["shard_dinov2.cases:cases"]
