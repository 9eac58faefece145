"""The kinds of blocks and MLPs that timm's vision transformers have, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardcore.styles import refuse, segments

#: The blocks that are supported.
BLOCKS = ("Block", "ResPostBlock")
#: The column linears of each kind of MLP. GluMlp computes a gate and what it gates as one.
MLPS: dict[str, Any] = {
    "Mlp": "mlp.fc1",
    "GluMlp": segments("mlp.fc1", 2),
    "SwiGLU": ("mlp.fc1_g", "mlp.fc1_x"),
}


def is_one(module: Any, *names: str) -> bool:
    """Tell whether a module is of a class with one of these names, or of a subclass."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _any_block(condition: Callable[[Any], bool]) -> Callable[[nn.Module], bool]:
    """Return a condition on the model: it has a block of this kind."""
    return lambda model: any(condition(block) for block in model.get_submodule("blocks").children())


#: What a model must not have.
REFUSALS = [
    refuse(
        _any_block(lambda block: not is_one(block, *BLOCKS)),
        f"its blocks are none of {', '.join(BLOCKS)}: parallel blocks run attention and MLP side by side",
    ),
    refuse(
        _any_block(lambda block: is_one(block, *BLOCKS) and not is_one(block.attn, "Attention")),
        "its attention is not timm's Attention: differential attention (attn_layer='diff') splits its heads in two",
    ),
    refuse(
        _any_block(lambda block: is_one(block, *BLOCKS) and not is_one(block.mlp, *MLPS)),
        f"its MLPs are none of {', '.join(MLPS)}",
    ),
]
