"""Prompts and prefixes: parameters outside of the model, which are whole on every rank, and the same on all.

They are plain, but for those that are trained beside a part of the model.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from peft import PeftModel, PeftType
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardcore.comm.collectives import copy_to_tp, refuse_double_backward
from shardcore.errors import NotSupportedError
from shardcore.fsdp.phase import data_axes
from shardcore.fsdp.scalars import on_replicas
from shardcore.mesh.context import ShardContext, context_of
from shardcore.nn import ParallelMixin, Replicated, ReplicatedLayout
from shardcore.nn.handlers import Undo
from shardcore.nn.layout import distribute
from shardcore.nn.loading import take_full_tensors
from shardcore.policy import HeadCounts
from shardcore_peft._checks import trains_beside

#: Where configurations of transformers have the number of heads that queries have; of a decoder before an encoder.
_QUERIES = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads")


class Prompts(ParallelMixin):
    """An encoder of prompts: the gradient of what it returns is that of all replicas, and of all heads.

    It returns the same for every sample, and computes it for one.
    """

    keeps_name: ClassVar[bool] = True

    #: Whether it makes keys and values, of which each rank uses those of its heads.
    _of_heads: bool
    #: Whether its parameters average their gradients themselves.
    _beside: bool
    _shard_context: ShardContext

    @classmethod
    def take(cls, encoder: nn.Module, context: ShardContext, *, of_heads: bool, beside: bool) -> Self:
        """Turn ``encoder`` into this class."""
        new = cls.swap_class(encoder, context)
        new.__dict__["_beside"] = beside
        new.__dict__["_of_heads"] = of_heads and context.size > 1
        return new

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return (B, n, d) for the tokens of prompts (B, n), which are the same for each sample."""
        out: Tensor = super().forward(tokens[:1], *args, **kwargs)
        if torch.is_grad_enabled():
            if (groups := self._shard_context.replica_groups) and not self._beside:
                out = _Averaged.apply(out, groups)  # type: ignore[no-untyped-call]  # untyped in torch
            if self._of_heads:
                out = copy_to_tp(out, self._shard_context.channel)
        return out.expand(tokens.size(0), *out.shape[1:])


class _Averaged(Function):
    """The identity; the backward averages the gradient over the replicas, as FSDP2 does those of parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: list[ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        total = grads[0].clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(total, group=group)
            total /= group.size()
        return total, None


def place_prompts(model: PeftModel, context: ShardContext) -> None:
    """Let the encoders of prompts that ``model`` has do what several ranks need."""
    if context.size == 1 and not context.replica_groups:
        return
    encoders = getattr(model, "prompt_encoder", None)
    for name, encoder in encoders.items() if isinstance(encoders, nn.ModuleDict) else ():
        if isinstance(encoder, Prompts):
            continue
        config = model.peft_config[name]
        beside = bool(trains_beside(config)) and not config.inference_mode
        Prompts.take(encoder, context, of_heads=config.peft_type == PeftType.PREFIX_TUNING, beside=beside)
        if beside:
            _join(encoder, context)


def refuse_foreign_prompts(instead: str) -> Undo | None:
    """Refuse prompts that PEFT's own function has put around a sharded model; None while nobody has imported PEFT.

    Prefixes would have the keys and values of all heads, and gradients would be those of one replica.
    """
    native = PeftModel.get_prompt

    @functools.wraps(native)
    def get_prompt(self: PeftModel, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.prompt_encoder[self.active_adapter], Prompts):
            for module in self.modules():
                context = context_of(module)
                if context is not None and (context.size > 1 or context.replica_groups):
                    raise NotSupportedError(
                        f"PEFT itself has put prompts around this {type(module).__name__}, which is sharded: they have "
                        f"what all ranks use, and gradients of one replica. {instead}"
                    )
        return native(self, *args, **kwargs)

    PeftModel.get_prompt = get_prompt

    def undo() -> None:
        if vars(PeftModel)["get_prompt"] is get_prompt:  # else somebody has replaced it since
            PeftModel.get_prompt = native

    return undo


def _join(encoder: nn.Module, context: ShardContext) -> None:
    """Let the parameters of ``encoder`` be DTensors, as those of the head are that is trained beside them.

    Each rank holds all of them. One optimizer, and one norm, then take both.
    """
    several = bool(context.replica_groups)
    axes = data_axes(context) if several else ()
    for module in list(encoder.modules()):
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        for name, parameter in own.items():
            held = distribute(parameter, ReplicatedLayout(), context) if context.size > 1 else parameter
            module._parameters[name] = on_replicas(held, context, axes) if several else held
        if own:
            Replicated.swap_class(module, context)
            take_full_tensors(module)


def keep_own_heads(model: PeftModel, found: Any, context: ShardContext) -> Any:
    """Return ``found``, the keys and values of prefixes, with the heads of this rank alone.

    Args:
        model: made them, by what PEFT calls ``get_prompt``.
        found: a cache of transformers, or one tensor (2, B, heads, n, d) for each layer.
        context: of the sharded model.
    """
    inner: Any = getattr(found, "self_attention_cache", found)
    if isinstance(inner, tuple | list):
        return type(inner)(_own(model, layer, context) for layer in inner)
    for layer in inner.layers:
        if layer.keys is not None:
            layer.keys, layer.values = _own(model, layer.keys, context), _own(model, layer.values, context)
    return found


def _own(model: PeftModel, whole: Tensor, context: ShardContext) -> Tensor:
    """Return the heads of this rank, (..., heads/tp, n, d), of all that keys or values have."""
    count = whole.size(-3)
    config: Any = model.get_base_model().config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = [getattr(config, name, None) for name in _QUERIES]
    queries = next((number for number in found if isinstance(number, int)), count)
    if queries % count:
        raise NotSupportedError(
            f"the prefixes have keys and values of {count} heads, and the {type(model.get_base_model()).__name__} has "
            f"{queries} heads of queries: nobody knows which of them are those of a rank. Use PROMPT_TUNING, P_TUNING "
            "or LORA"
        )
    heads = HeadCounts(query=queries, kv=count, ranks=context.size, rank=context.rank).kv_heads
    return whole[..., list(heads), :, :]
