"""The attention of timm's second Swins by heads: their own forwards read whole weights, and view all heads."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from shardcore.nn import ReplacedMethods

#: Scales of cosines, of which the parameters are logarithms, are cut off at 100.
_LARGEST = math.log(100.0)


class Swinv2Attention(ReplacedMethods):
    """`timm.models.swin_transformer_v2.WindowAttention` of this rank's heads. Written against timm 1.0.23 to 1.0.31."""

    @override
    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, N, C) for windows (B, N, C); ``mask`` is (windows, N, N)."""
        q, k, v = _heads(self, x)
        if self.q_bias is not None:  # keys have none
            q, v = (t + bias.view(1, self.num_heads, 1, -1) for t, bias in ((q, self.q_bias), (v, self.v_bias)))
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        biases = 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()
        return _attended(self, q, k, v, biases, mask)


class Swinv2CrAttention(ReplacedMethods):
    """`timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention` of this rank's heads. Written against the same."""

    @override
    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, N, C) for windows (B, N, C); ``mask`` is (windows, N, N)."""
        q, k, v = _heads(self, x)
        return _attended(self, q, k, v, self._relative_positional_encodings(), mask)


def _heads(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values (B, heads/tp, N, D)."""
    return tuple(module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4))


def _attended(module: Any, q: Tensor, k: Tensor, v: Tensor, biases: Tensor, mask: Tensor | None) -> Tensor:
    """Return what attention by cosines returns (B, N, C)."""
    scale = module.logit_scale.view(-1, 1, 1).clamp(max=_LARGEST).exp()
    scores = normalize(q, dim=-1) @ normalize(k, dim=-1).mT * scale + biases
    if mask is not None:
        scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
    out = module.attn_drop(scores.softmax(-1)) @ v
    projected: Tensor = module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))
    return projected
