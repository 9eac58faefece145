"""Regions that are entered inside of a module: what replicated linears return enters, not the input of the module.

In latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) one replicated linear makes the latent states, from
which column linears make keys and values, and a rotary key that all heads read. Both are used by this rank's heads, so
the gradient of what the linear returns is summed; the linear itself and all before it then work on whole tensors with
whole gradients, on every rank alike. Latent states are smaller than the input of the module, and so is what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import copy_to_tp
from shardcore.comm.sequence import gather_sequence
from shardcore.errors import NotSupportedError
from shardcore.nn.region.region import Region

__all__ = ["InnerRegion"]


class InnerRegion(Region):
    """A region whose entries are inside of its module.

    The hook on the module's call gathers the tokens, where they are split: forward an all-gather, backward this rank's
    tokens, since the gradient there is whole. The entries are identities whose backward is an all-reduce. Dropout
    before the first of them draws the same numbers on all ranks, unless tokens are split.
    """

    def enter_at(self, places: Iterable[tuple[nn.Module, bool]]) -> None:
        """Enter at these modules: with the input of those that are members (True), with the output of the others."""
        for module, is_member in places:
            if is_member:
                module.register_forward_pre_hook(self._with_input)
            else:
                module.register_forward_hook(self._with_output)

    @override
    def _fork(self) -> None:
        if not torch.compiler.is_compiling():
            self.context.random.drop(id(self))  # of a call that was cut short

    @override
    def _enter(self, x: Tensor) -> Tensor:
        length = None if self.sequence is None else self.sequence.length
        if self.sequence is None or length is None:
            return x
        self.sequence.expect(x, self.sequence.local, "a tensor-parallel region")
        return gather_sequence(x, self.context.channel, length)

    def _with_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._entered(module, args[0]), *args[1:])

    def _with_output(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return self._entered(module, out)

    def _entered(self, module: nn.Module, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise NotSupportedError(
                f"a {type(module).__name__}, at which a tensor-parallel region is entered, returns a "
                f"{type(x).__name__}; wanted one tensor. Correct enter= of the region in the policy"
            )
        if self.sequence is None or self.sequence.length is None:
            self._fork_once()
        return copy_to_tp(x, self.context.channel) if torch.is_grad_enabled() else x

    def _fork_once(self) -> None:
        random, compiling = self.context.random, torch.compiler.is_compiling()
        live = self._dropouts is not None and (self._dropouts.live() or (not compiling and random.in_use))
        if not compiling:
            self._is_forked = live
        if live:
            random.fork(id(self), once=True)
