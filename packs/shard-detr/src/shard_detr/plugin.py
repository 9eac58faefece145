"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: By the module of transformers: the module of policies, and what the names of its classes begin with.
_FAMILIES = {
    "conditional_detr": ("conditional", "ConditionalDetr"),
    "deformable_detr": ("deformable", "DeformableDetr"),
    "detr": ("policy", "Detr"),
    "rt_detr": ("rt", "RTDetr"),
    "rt_detr_v2": ("rt", "RTDetrV2"),
    "table_transformer": ("tables", "TableTransformer"),
}
#: Which of them draw masks.
_MASKS = ("conditional_detr", "detr")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DETR and what is built like it, with heads and without."""
    targets = {
        module: f"transformers.models.{module}.modeling_{module}.{name}" for module, (_, name) in _FAMILIES.items()
    }
    detecting = [
        PolicySpec(target=f"{targets[module]}{head}", policy=f"shard_detr.{policies}:{name}Policy")
        for module, (policies, name) in _FAMILIES.items()
        for head in ("Model", "ForObjectDetection")
    ]
    masks = [
        PolicySpec(
            target=f"{targets[module]}ForSegmentation",
            policy=f"shard_detr.masks:{_FAMILIES[module][1]}ForSegmentationPolicy",
        )
        for module in _MASKS
    ]
    return detecting + masks


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_detr.cases:cases"]
