"""Modules whose calls run on the random stream of the sharded model; the outermost also refuses what cannot work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore._torch import backward_task, in_transform
from shardcore.errors import NotSupportedError, WrapError
from shardcore.mesh import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.intact import Intact
from shardcore.nn.randomness.dropout import DropoutSites

__all__ = ["RngScope", "ShardedModel"]


class RngScope(ParallelMixin):
    """A module whose outermost call runs on the model's random stream; the user's generators are always restored.

    The forward is wrapped, not hooked: hooks are not called after an interrupt, which would leave the stream in place.

    Options:
        draws: what was found in the code of classes; see `DropoutSites`.
    """

    keeps_name: ClassVar[bool] = True

    _stream_dropouts: DropoutSites
    _shard_context: ShardContext

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context)
        new.__dict__["_stream_dropouts"] = DropoutSites([module], draws=options.get("draws"))
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the model's random stream.

        Raises:
            NotSupportedError: a checkpoint around the module recomputes it while one of its dropouts is live.
        """
        entered = self._shard_enter()
        try:
            return super().forward(*args, **kwargs)
        finally:
            if entered:
                self._shard_context.random.leave()

    def on_stream(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``, which runs the module, on the model's random stream; see `forward`."""
        entered = self._shard_enter()
        try:
            return function(*args, **kwargs)
        finally:
            if entered:
                self._shard_context.random.leave()

    def _shard_enter(self) -> bool:
        """Use the model's stream, and tell whether it has to be left; False where a backward recomputes a forward."""
        if torch.compiler.is_compiling():
            return self._stream_dropouts.live() and _enter_untraced(self)
        if backward_task() == -1:  # no public way to ask whether a backward is running
            self._shard_context.random.enter(self._stream_dropouts.live)
            return True
        if self._stream_dropouts.live():
            raise NotSupportedError(
                f"a checkpoint around the whole {type(self).__name__} recomputes it with other dropout masks: its "
                "random stream has moved on. Checkpoint its blocks instead (model.gradient_checkpointing_enable()), "
                "or set the dropout probabilities to 0."
            )
        return False


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _enter_untraced(module: RngScope) -> bool:
    return module._shard_enter()


class ShardedModel(RngScope):
    """A sharded model: the user's object, which refuses another kind of device, and modules put in its regions."""

    keeps_name: ClassVar[bool] = True

    #: What may not be changed; None until the model is sharded.
    _shard_intact: Intact | None = None

    @override
    def _shard_enter(self) -> bool:
        """Refuse a call that cannot work, and use the model's stream.

        Raises:
            WrapError: a module or parameter was put into the model, or replaced, where activations are split.
            NotSupportedError: this is inside of a transform of torch.func, or traced by torch.jit.
        """
        if not torch.compiler.is_compiling():
            if self._shard_intact is not None:
                self._shard_intact.check(self)
            if in_transform():
                raise NotSupportedError(
                    f"this {type(self).__name__} is sharded and was called inside of a transform of torch.func (grad, "
                    "vjp, jvp, vmap, jacrev, hessian), none of which goes through collectives. For gradients call "
                    "torch.autograd.grad on the loss, or its backward(); torch.func.functional_call alone works."
                )
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # untyped in torch
            raise NotSupportedError(
                f"this {type(self).__name__} is sharded, and torch.jit.trace (of the older ONNX exporter too, and "
                "of TensorBoard's graphs) records no collectives. Save the model, load it unsharded, and trace that."
            )
        return super()._shard_enter()

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
