"""The outermost module of a sharded model, which refuses what must not be done to it and says what works instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shardcore._torch import in_transform
from shardcore.errors import NotSupportedError, WrapError
from shardcore.nn.intact import Intact
from shardcore.nn.randomness.guard import RngScope

__all__ = ["ShardedModel"]


class ShardedModel(RngScope):
    """A sharded model: the user's object, which refuses another kind of device, and modules put in its regions."""

    keeps_name: ClassVar[bool] = True

    #: What may not be changed; None until the model is sharded.
    _shard_intact: Intact | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, unless somebody put modules where they cannot work.

        Raises:
            WrapError: a module or parameter was put into the model, or replaced, where activations are split.
            NotSupportedError: this is inside of a transform of torch.func, or traced by torch.jit.
        """
        if self._shard_intact is not None and not torch.compiler.is_compiling():
            self._shard_intact.check(self)
        if in_transform() and not torch.compiler.is_compiling():
            raise NotSupportedError(
                f"this {type(self).__name__} is sharded and was called inside of a transform of torch.func (grad, vjp, "
                "jvp, vmap, jacrev, hessian), none of which goes through collectives. For gradients call "
                "torch.autograd.grad on the loss, or its backward(); torch.func.functional_call alone works."
            )
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # untyped in torch
            raise NotSupportedError(
                f"this {type(self).__name__} is sharded, and torch.jit.trace (of the older ONNX exporter too, and "
                "of TensorBoard's graphs) records no collectives. Save the model, load it unsharded, and trace that."
            )
        return super().forward(*args, **kwargs)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Give every tensor memory without values, unless that is for good.

        Raises:
            WrapError: there are buffers that the code of the model computes and that no state dict brings back.
        """
        kept = {id(tensor) for tensor in self.state_dict(keep_vars=True).values()}
        computed = [name for name, buffer in self.named_buffers() if id(buffer) not in kept and buffer.numel()]
        if computed and torch.device(device).type != "meta":
            raise WrapError(
                f"to_empty would leave {computed[0]}{f' and {len(computed) - 1} more' if computed[1:] else ''} without "
                f"values: the code of this {type(self).__name__} computes them, and no checkpoint has them. Use "
                "shardcore.initialize(model), which gives every parameter and buffer its values, before you load "
                "others; or read a checkpoint as you shard: shardcore.shard(model, ..., weights=folder)."
            )
        return super().to_empty(device=device, recurse=recurse)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wanted = fn(torch.empty(0, device=self._shard_context.device)).device.type
        have = self._shard_context.tp.device_type
        if wanted not in (have, "meta"):
            raise WrapError(
                f"a model sharded over ranks on {have!r} cannot be moved to {wanted!r}: its device mesh stays behind. "
                f"Move it before shard(); for {wanted!r} start the process group with the backend of that device "
                "(nccl for cuda) and shard() moves each part by itself. To get the weights elsewhere, save them with "
                "save_pretrained or torch.distributed.checkpoint."
            )
        super()._apply(fn, recurse)
        return self
