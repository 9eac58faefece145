"""Quantized linears as linears: what a policy calls ``column("q_proj")`` is a ``torch.nn.Linear`` where it is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.plan import ShardPlan
from shardcore.plan.shard_plan import ModelPhase
from shardcore_quantized.packed import PackedWeight


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return what quantized weights are read in that do not say so: the dtype of what is not quantized."""
    wide = (p.dtype for name, p in model.named_parameters() if p.itemsize > 1 and "scale" not in name)
    return next(wide, torch.bfloat16)


class Unpacking(ModelPhase):
    """Quantized linears, which are ``torch.nn.Linear`` with a `PackedWeight` from `begin` on.

    Args:
        model: what has them.
        linears: they and their weights, by their paths.
        own: the attributes that they have beside those of ``torch.nn.Linear``.
    """

    def __init__(
        self, model: nn.Module, linears: Mapping[str, tuple[nn.Module, PackedWeight]], own: tuple[str, ...] = ()
    ) -> None:
        self._model = model
        self._linears = dict(linears)
        self._own = own
        self._before: list[tuple[nn.Module, type, dict[str, Any]]] = []

    def begin(self) -> None:
        """Make them linears."""
        for module, weight in self._linears.values():
            self._before.append((module, type(module), dict(vars(module))))
            for name in self._own:
                vars(module).pop(name, None)
            module.__class__ = nn.Linear
            held = {"weight": nn.Parameter(weight, requires_grad=False), "bias": module._parameters["bias"]}
            vars(module)["_parameters"] = held  # scales that are parameters are in the weight

    def check(self, plan: ShardPlan) -> None:
        """Refuse parts that would begin or end inside of a block.

        Raises:
            NotSupportedError: one would.
        """
        ranks = plan.config.tensor_parallel_size or 1
        for path, (_, held) in self._linears.items():
            if plan.config.enable_sequence_overlap and not held.by_pieces:
                raise NotSupportedError(
                    f"{path} is {held.called}, whose products depend on all tokens, and enable_sequence_overlap "
                    "multiplies them in pieces: leave that out"
                )
        weights = dict(self._linears.values())
        modules = dict(self._model.named_modules())  # without adapters by now, and with other paths
        for parameter in plan.parameters:
            weight = weights.get(modules.get(parameter.name.removesuffix(".weight"), self._model))
            if weight is None or parameter.layout is None:
                continue
            whole = tuple(weight.shape)
            for rank in range(ranks):
                rows, columns = parameter.layout.shape(whole, ranks, rank)
                if not weight.has_whole_blocks(rows, columns):
                    raise NotSupportedError(
                        f"{parameter.name}, {whole[0]} x {whole[1]}, is quantized in blocks of {weight.blocks}, and "
                        f"the part of rank {rank} of {ranks}, {rows} x {columns}, is no whole number of them: take "
                        f"fewer ranks, or leave the module out of quantization ({weight.way_out})"
                    )

    def give_up(self) -> None:
        """Make them what they were."""
        for module, kind, attributes in self._before:
            module.__class__ = kind
            vars(module).update(attributes)
        self._before.clear()
        self._linears.clear()

    def runs(self, context: ShardContext | None) -> bool:
        """Also where nothing was sharded: they become what they were."""
        return True

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Let go of what they were, and tell them how they are divided."""
        if context is None:
            self.give_up()
        else:
            for module, weight in self._linears.values():
                weight.divided(local_tensor(module.weight), context.channel.exact)  # type: ignore[arg-type]  # a parameter
        self._before.clear()
        self._linears.clear()
