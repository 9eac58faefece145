"""What surrounds the calls of a whole model: its random stream, what it refuses, and a first look at its gradients.

Each way of calling a model is looked at once: wrong gradients are an error before any backward makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from shardcore._torch import backward_task, in_transform
from shardcore.errors import NotSupportedError, PlanError, WrapError
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.intact import Intact
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.region.flow import Graph
from shardcore.nn.region.gradients import problems, wrong_gradients


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
        """Run the native forward on the model's random stream."""
        return self.on_stream(super().forward, args, kwargs)

    def on_stream(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``, which runs the module, on the model's random stream."""
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
    """A sharded model: the user's object, which refuses another kind of device, and modules put in its regions.

    Its first call of each kind is looked at: wrong gradients are an error before a backward makes them. Calls are of
    one kind if they have the same arguments, as far as these decide what runs: which ones there are, which of them need
    a gradient, what is switched on, the training mode, and, where a policy is new, which parameters are trained. A
    later call of a kind costs a look into a set.

    Each rank judges by itself: what is wrong follows from the policy and the call, which are the same on all. They do
    not meet for it, since which kinds a rank has seen is its own: an argument that changes nothing may differ.
    """

    keeps_name: ClassVar[bool] = True

    #: What may not be changed; None until the model is sharded.
    _shard_intact: Intact | None = None
    #: The kinds of calls that were looked at; None until the model is sharded.
    _checked_kinds: set[Hashable] | None = None
    #: Of all modules, where it matters which are trained; which modules there are another check looks at.
    _checked_parameters: list[dict[str, nn.Parameter | None]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward; raise a `PlanError` if the gradients of this kind of call would be wrong."""
        out = super().forward(*args, **kwargs)
        if self._checked_kinds is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return out
        kind = self._kind(args, kwargs)
        if kind not in self._checked_kinds and backward_task() == -1:
            self._check_gradients(out, args, kwargs)
            self._checked_kinds.add(kind)
        return out

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        ranks = self._shard_context.channel.size
        found: list[Any] = [self.training]
        for held in self._checked_parameters:
            for parameter in held.values():
                found.append(parameter is not None and parameter.requires_grad)
        for value in args:
            found.append(_kind_of(value, ranks))
        for name in sorted(kwargs):
            found += (name, _kind_of(kwargs[name], ranks))
        return tuple(found)

    def _check_gradients(self, out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {f"at position {i}": value for i, value in enumerate(args)} | {repr(n): v for n, v in kwargs.items()}
        tensors = [(name, t) for name, value in given.items() for t in tree_leaves(value) if isinstance(t, Tensor)]
        graph = Graph(list(_differentiated(out)), [t for _, t in tensors])
        arguments = {id(t): name for name, t in tensors}
        judged = arguments | {id(p): "" for p in self.parameters() if not isinstance(p, DTensor)}
        if wrong := wrong_gradients(graph, judged):
            what = f"the gradients of this {type(self).__name__} would be wrong, though what it returns is right"
            raise PlanError(what, problems(self, graph, wrong, arguments))

    @override
    def _shard_enter(self) -> bool:
        """Refuse a call that cannot work, and use the model's stream."""
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
        """Give every tensor memory without values; refuse it where no state dict would bring some of them back."""
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


def check_gradients(model: nn.Module, *, whatever_is_trained: bool) -> None:
    """Let a sharded model check the gradients of each kind of call, also by which parameters are trained if asked."""
    held = [module._parameters for module in model.modules() if module._parameters] if whatever_is_trained else []
    model.__dict__.update(_checked_kinds=set(), _checked_parameters=held)


def _kind_of(value: Any, ranks: int) -> Any:
    if isinstance(value, Tensor):
        # Too few tokens are not split.
        return value.requires_grad, value.ndim, value.ndim > 1 and value.size(1) >= ranks
    if isinstance(value, tuple | list | dict):
        return type(value), any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
    return value if value is None or isinstance(value, bool) else type(value)


def _differentiated(out: Any) -> Iterator[Tensor]:
    """Yield the outputs that a backward is expected to start from: the loss if there is one, or else all tensors.

    Tensors inside of further containers are left out: captured states and caches may hold this rank's part.
    """
    items: Sequence[Any] = [out]
    if isinstance(out, Mapping):
        items = [out["loss"]] if isinstance(out.get("loss"), Tensor) else list(out.values())
    elif isinstance(out, tuple | list):
        items = out
    if len(items) > 1 and isinstance(items[0], Tensor) and items[0].ndim == 0:
        items = items[:1]
    for item in items:
        if isinstance(item, Tensor) and item.requires_grad and not isinstance(item, DTensor):
            yield item
