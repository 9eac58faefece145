"""The attention of timm's EVA, BEiT and CaiT by heads: their own forwards read whole weights, or view all heads."""

from __future__ import annotations

from typing import Any

from timm.layers import apply_rot_embed_cat
from torch import Tensor, cat
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from shardcore.nn import ReplacedMethods


class EvaAttention(ReplacedMethods):
    """`timm.models.eva.EvaAttention` of this rank's heads. Written against timm 1.0.23 to 1.0.31."""

    @override
    def forward(
        self: Any, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return (B, N, C) for (B, N, C)."""
        gate = self.gate(x).sigmoid() if getattr(self, "gate", None) is not None else None
        q, k, v = _heads(self, x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (_rotated(t, rope, self.num_prefix_tokens, half=self.rotate_half).type_as(v) for t in (q, k))
        out = self.norm(_attended(self, q, k, v, attn_mask, is_causal=is_causal))
        projected: Tensor = self.proj_drop(self.proj(out if gate is None else out * gate))
        return projected


class BeitAttention(ReplacedMethods):
    """`timm.models.beit.Attention` of this rank's heads. Written against timm 1.0.23 to 1.0.31."""

    @override
    def forward(self: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Return (B, N, C) for (B, N, C)."""
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        q, k, v = _heads(self, x)
        projected: Tensor = self.proj_drop(self.proj(_attended(self, q, k, v, bias)))
        return projected


class ClassAttention(ReplacedMethods):
    """`timm.models.cait.ClassAttn` of this rank's heads. Written against timm 1.0.23 to 1.0.31."""

    @override
    def forward(self: Any, x: Tensor) -> Tensor:
        """Return (B, 1, C) for (B, N, C): the first token attends to all."""
        linears = ((self.q, x[:, :1]), (self.k, x), (self.v, x))
        q, k, v = (linear(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for linear, t in linears)
        projected: Tensor = self.proj_drop(self.proj(_attended(self, q, k, v)))
        return projected


def _heads(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values (B, heads/tp, N, D)."""
    if module.qkv is None:
        linears = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (linear(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for linear in linears)
    else:
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    if module.q_bias is not None:  # keys have none
        q, v = (t + bias.view(1, module.num_heads, 1, -1) for t, bias in ((q, module.q_bias), (v, module.v_bias)))
    return q, k, v


def _rotated(x: Tensor, rope: Tensor, first: int, *, half: bool) -> Tensor:
    """Rotate all tokens but the ``first`` ones."""
    return cat([x[:, :, :first], apply_rot_embed_cat(x[:, :, first:], rope, half=half)], dim=2)


def _attended(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """Return (B, N, C/tp)."""
    rate = module.attn_drop.p if module.training else 0.0
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=is_causal)
    return out.transpose(1, 2).flatten(2)
