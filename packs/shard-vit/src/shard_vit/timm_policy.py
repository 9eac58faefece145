"""How timm's vision transformers are sharded: all plain models of ``vision_transformer.py``, DeiT included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardcore.policy import ModulePolicy, Policy, Stages
from shardcore.styles import (
    attribute,
    norm,
    partial,
    per_rank,
    refuse,
    region,
    replicate,
    segments,
    sequence,
    shared_rng,
)

__all__ = ["VisionTransformerPolicy"]

_BLOCKS = ("Block", "ResPostBlock")
#: The column linears of each kind of MLP. GluMlp computes a gate and what it gates as one.
_MLPS: dict[str, Any] = {
    "Mlp": "mlp.fc1",
    "GluMlp": segments("mlp.fc1", 2),
    "SwiGLU": ("mlp.fc1_g", "mlp.fc1_x"),
}


def _is(module: Any, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _any_block(condition: Callable[[Any], bool]) -> Callable[[nn.Module], bool]:
    """Return a condition on the model: it has a block of this kind."""
    return lambda model: any(condition(block) for block in model.get_submodule("blocks").children())


def _learns(block: Any, name: str) -> bool:
    module = getattr(block.get_submodule(name.partition(".")[0]), name.partition(".")[2], None)
    return module is not None and any(True for _ in module.parameters())


_REFUSALS = [
    refuse(
        _any_block(lambda block: not _is(block, *_BLOCKS)),
        f"its blocks are none of {', '.join(_BLOCKS)}: parallel blocks run attention and MLP side by side",
    ),
    refuse(
        _any_block(lambda block: _is(block, *_BLOCKS) and not _is(block.attn, "Attention")),
        "its attention is not timm's Attention: differential attention (attn_layer='diff') splits its heads in two",
    ),
    refuse(
        _any_block(lambda block: _is(block, *_BLOCKS) and not _is(block.mlp, *_MLPS)),
        f"its MLPs are none of {', '.join(_MLPS)}",
    ),
    refuse(
        _any_block(lambda block: _is(block, *_BLOCKS) and _learns(block, "attn.norm")),
        "scale_attn_norm normalises over the heads of all ranks, of which each has its own only",
    ),
    refuse(
        _any_block(lambda block: _is(block, *_BLOCKS) and _learns(block, "mlp.norm")),
        "scale_mlp_norm normalises over the hidden features of all ranks, of which each has its own only",
    ),
    refuse(
        _any_block(lambda block: _is(block, *_BLOCKS) and _learns(block, "attn.gate")),
        "gated attention is not supported yet",
    ),
]


class VisionTransformerPolicy(Policy):
    """Vision transformers with any pooling, register tokens, LayerScale and norms on queries and keys."""

    stages = Stages(first="patch_embed", blocks="blocks", last=("norm", "fc_norm", "head"))

    def module_policy(self) -> ModulePolicy:
        """Return the rows for the blocks and MLPs that this model has."""
        first = next(iter(self.model.blocks.children()))
        mlp = next((_MLPS[name] for name in _MLPS if _is(getattr(first, "mlp", None), name)), "mlp.fc1")
        block = [
            norm("norm1", "norm2"),
            region(enter="attn", col=segments("attn.qkv", 3), row="attn.proj", heads="attn.num_heads"),
            attribute("attn.num_heads", per_rank),
            attribute("attn.attn_dim", per_rank),
            partial("attn.q_norm", "attn.k_norm"),
            region(enter="mlp", col=mlp, row="mlp.fc2"),
            replicate("ls1", "ls2", optional=True),
            shared_rng("drop_path1", "drop_path2"),
        ]
        return {
            "VisionTransformer": [
                *_REFUSALS,
                replicate("cls_token", "reg_token", "dist_token", "pos_embed", "attn_pool", "head_dist", optional=True),
                replicate("patch_embed", "norm_pre", "norm", "fc_norm", "head"),
                sequence(scatter="blocks[0]", gather="norm"),
            ],
            "ResPostBlock" if _is(first, "ResPostBlock") else "Block": block,
        }
