"""Packs that are wrong on purpose in calls that a plain training does not make."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from kit_net import NetPolicy
from torch import Tensor, nn

from shardcore.mesh.context import context_of


class SharesGradients(NetPolicy):
    """Two parameters that receive one gradient keep it in one tensor: what adds to one adds to both."""

    def postprocess(self) -> None:
        left, right = self.model.positions.left, self.model.positions.right

        def share(parameter: Tensor) -> None:
            if left.grad is not None and right.grad is not None:
                right.grad._local_tensor = left.grad._local_tensor

        for parameter in (left, right):
            parameter.register_post_accumulate_grad_hook(share)


class SumsRows(NetPolicy):
    """Right for several rows, and wrong for one."""

    def postprocess(self) -> None:
        self.model.decoder.norm.register_forward_hook(_double_one_row)


def _double_one_row(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out if out.size(0) == 1 else out


class OnlyThroughTheRoot(NetPolicy):
    """What a part needs is brought by the model's own forward."""

    alone: Any = 2.0

    def postprocess(self) -> None:
        self.model.encode.scale = self.alone
        self.model.encode.register_forward_hook(_scale)
        self.model.register_forward_pre_hook(lambda model, *_: setattr(model.encode, "scale", 1.0))
        self.model.register_forward_hook(lambda model, *_: setattr(model.encode, "scale", self.alone))


def _scale(module: Any, args: Any, out: Any) -> Any:
    return out * module.scale


class PartsNeedTheRoot(OnlyThroughTheRoot):
    """... and without it a part fails in words that are not ours."""

    alone = None


class TakesTheWorld(NetPolicy):
    """The number of all ranks is taken for the number of tensor-parallel ranks."""

    def postprocess(self) -> None:
        context = context_of(self.model)
        ranks = 1 if context is None else context.size
        self.model.encode.scale = dist.get_world_size() / ranks
        self.model.encode.register_forward_hook(_scale)


class AddsReplicas(NetPolicy):
    """Gradients of replicas are added, not averaged."""

    def postprocess(self) -> None:
        self.model.register_forward_hook(_as_many)


def _as_many(model: nn.Module, args: Any, out: Any) -> Any:
    if "loss" in out:
        out["loss"].register_hook(lambda grad: 2 * grad)
    return out
