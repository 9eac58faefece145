"""`torch.nn.TransformerEncoder`, which in evaluation may compute nothing for padding.

Without gradients torch's encoder takes the padding out of its batch (nested tensors), and its output there is zero
before the last norm. Layers that are split run padded, so what they make of padding is replaced by that.

Its kernel for whole layers takes any value of a floating mask but 0 for minus infinity. Here such a mask is what it is
with gradients: added to the scores.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore import ShardContext
from shardcore.errors import NotSupportedError
from shardcore.nn import ParallelMixin

_DEVICES = ("cpu", "cuda", "xpu")


class PaddedEncoder(ParallelMixin):
    """An encoder whose batch stays padded, with the output that torch gives: nested tensors are taken apart nowhere."""

    keeps_name: ClassVar[bool] = True

    #: What the user asked for.
    _use_nested_tensor: bool

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context)
        new.__dict__["_use_nested_tensor"] = bool(getattr(new, "use_nested_tensor", False))
        new.__dict__["use_nested_tensor"] = False
        return new

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Run the native forward, and set what it returns for padding.

        Raises:
            NotSupportedError: padding that is not at the end, without ``mask_check``: torch takes other tokens out.
        """
        given = src_key_padding_mask
        if given is None or mask is not None or not self._takes_padding_out(src):
            return super().forward(src, mask, given, is_causal)  # type: ignore[no-any-return]
        padding = given if given.dtype == torch.bool else given == float("-inf")
        if given.dtype != torch.bool and bool((given[~padding] != 0).any()):
            return super().forward(src, mask, given, is_causal)  # type: ignore[no-any-return]  # no padding, but a bias
        if bool((padding[:, :-1] & ~padding[:, 1:]).any()):
            if getattr(self, "mask_check", True):
                return super().forward(src, mask, given, is_causal)  # type: ignore[no-any-return]
            raise NotSupportedError(
                f"{type(self).__name__} has mask_check=False and got padding that is not at the end of its rows: "
                "pass enable_nested_tensor=False, or mask_check=True"
            )
        out: Tensor = super().forward(src, mask, padding, is_causal)
        nothing = out.new_zeros(1, 1, out.size(-1))
        norm = self._modules.get("norm")
        return torch.where(padding[..., None], nothing if norm is None else norm(nothing), out)

    def _takes_padding_out(self, src: Tensor) -> bool:
        """Tell whether torch's encoder would, for a batch that is padded at the end alone."""
        first: nn.Module = self.layers[0]  # type: ignore[index,assignment]  # a list of layers
        used = (src, *first.parameters())
        return (
            self._use_nested_tensor
            and torch.backends.mha.get_fastpath_enabled()
            and not first.training
            and src.dim() == 3
            and not (getattr(self, "mask_check", True) and torch.compiler.is_compiling())
            and not torch.is_autocast_enabled()
            and src.device.type in _DEVICES
            and not (torch.is_grad_enabled() and any(x.requires_grad for x in used))
        )
