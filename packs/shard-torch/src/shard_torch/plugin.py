"""What this pack offers to shardcore: strings only, so that discovering it imports no torch."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: The classes that are served as models, by the module of torch that defines them.
_CLASSES = {
    "torch.nn.modules.transformer": (
        "Transformer",
        "TransformerEncoder",
        "TransformerDecoder",
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
    ),
    "torch.nn.modules.activation": ("MultiheadAttention",),
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve the transformers of torch, their layers and their attention."""
    return [
        PolicySpec(target=f"{module}.{name}", policy=f"shard_torch.policy:{name}Policy")
        for module, names in _CLASSES.items()
        for name in names
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class."""
    return ["shard_torch.cases:cases"]
