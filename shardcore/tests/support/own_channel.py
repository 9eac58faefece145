"""A channel of one's own: activations travel in bfloat16. One class, and nothing else of shardcore knows it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardcore._torch import funcol
from shardcore.comm import Channel
from shardcore.comm.channel import Pending

WIRE = torch.bfloat16


class HalfChannel(Channel):
    """Rounds what it sends to bfloat16 and sums what arrives in the dtype that it had.

    Each sum is one round of parts to their ranks and one of sums to all, so that all ranks end with the same bits.
    """

    def __init__(self, group):
        super().__init__(group)
        self._exact = Channel(group)

    @property
    def exact(self):
        return self._exact

    def all_reduce(self, x: Tensor) -> Tensor:
        step = -(-x.numel() // self.size)
        flat = torch.cat([x.reshape(-1), x.new_zeros(self.size * step - x.numel())])
        total = self.all_gather(self.reduce_scatter(flat.view(self.size, step))).reshape(-1)[: x.numel()].view(x.shape)
        return total if torch.compiler.is_compiling() else x.copy_(total)

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending(None, lambda: self.all_reduce(x), x)

    def all_gather(self, x: Tensor) -> Tensor:
        return super().all_gather(x.to(WIRE)).to(x.dtype)

    def start_all_gather(self, x: Tensor) -> Pending:
        pending = super().start_all_gather(x.to(WIRE))
        return Pending(None, lambda: pending.wait().to(x.dtype), x)

    def reduce_scatter(self, stacked: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.start_reduce_scatter(stacked).wait()
        payload = stacked.to(WIRE).contiguous()
        summands = funcol.wait_tensor(funcol.all_to_all_single(payload, None, None, self.group))
        return summands.to(stacked.dtype).sum(0)

    def start_reduce_scatter(self, stacked: Tensor) -> Pending:
        payload = stacked.to(WIRE).contiguous()
        summands = torch.empty_like(payload)
        work = dist.all_to_all_single(summands, payload, group=self.group, async_op=True)
        return Pending(work, lambda: summands.to(stacked.dtype).sum(0), payload)
