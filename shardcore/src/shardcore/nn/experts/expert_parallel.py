"""Experts of which each rank has whole ones: tokens travel to them and back.

The ranks of the axis ``ep`` are replicas, each with tokens of its own. A token goes once to each rank that has an
expert of its, with the numbers and the weights of its experts; the native forward runs there, and what comes back is
added up. No expert has a capacity: none of its tokens is left out.

The loss of the replicas is the mean of theirs, so that an expert's gradient, which has summands of all of them, is
divided by their number: the gradients of tokens are, on the way in, and multiplied by it on the way out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm import norms
from shardcore.comm.collectives import Channel, chunk_bounds
from shardcore.comm.dispatch import combine, dispatch, plan_dispatch
from shardcore.comm.experts import touch
from shardcore.mesh.context import ShardContext
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.experts.tensor_parallel import Cut, ExpertTensorParallel
from shardcore.nn.layout import ExpertsLayout, Layout, last_rank_is_empty

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_COUNT = "num_experts"


class ExpertParallel(ExpertTensorParallel):
    """The weights of all experts in one module, of which each rank of ``ep`` has those of whole ones.

    Its native ``forward(hidden_states, top_k_index, top_k_weights)`` takes tokens (T, H), the numbers of the experts of
    each (T, k) and their weights (T, k), and returns what they add up, (T, H). Over ``tp``, each expert is split as
    `ExpertTensorParallel` splits it; ``spread`` is the number of ranks on ``ep``.
    """

    option_names: ClassVar[frozenset[str]] = frozenset({"cuts", "spread"})
    plan_needs_tp: ClassVar[bool] = False

    _experts_channel: Channel
    #: The first of this rank's experts, and how many a rank has.
    _experts_first: int
    _experts_each: int

    @classmethod
    @override
    def problem(
        cls, module: nn.Module, ranks: int, *, cuts: tuple[Cut, ...] = (), spread: int = 1, **options: Any
    ) -> str | None:
        if problem := super().problem(module, ranks, cuts=cuts, **options):
            return problem
        kind, count = type(module).__name__, _experts_of(module)
        if tuple(inspect.signature(type(module).forward).parameters)[1:] != _ARGUMENTS:
            return f"{kind}.forward{inspect.signature(type(module).forward)} does not take {', '.join(_ARGUMENTS)}"
        if getattr(module, _COUNT, None) != count:
            return f"{kind}.{_COUNT} is {getattr(module, _COUNT, 'missing')}, but there are weights of {count} experts"
        if last_rank_is_empty(count, spread):
            return f"{count} experts of {kind} leave the last of {spread} ranks of the axis ep without one"
        return norms.torch_lacks()

    @classmethod
    @override
    def layouts(
        cls, module: nn.Module, ranks: int, *, cuts: tuple[Cut, ...] = (), spread: int = 1, **options: Any
    ) -> Mapping[str, Layout]:
        inner = super().layouts(module, ranks, cuts=cuts, **options)
        return {name: ExpertsLayout(spread, layout if ranks > 1 else None) for name, layout in inner.items()}

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        yield forward(site.path, "all_to_all", "how many tokens go to each rank of ep")
        yield forward(site.path, "all_to_all", "(P, H) tokens, with the numbers and weights of their experts")
        yield forward(site.path, "all_to_all", "(P, H) what the experts made of them")
        yield backward(site.path, "all_to_all", "(P, H) gradients of that")
        yield backward(site.path, "all_to_all", "(P, H) gradients of tokens, with those of weights")

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, cuts: tuple[Cut, ...] = (), spread: int = 1, **options: Any
    ) -> Self:
        norms.install()
        count, channel = _experts_of(module), context.axis("ep")
        first, stop = chunk_bounds(count, spread, channel.rank)
        new = super().swap_class(module, context, cuts=cuts)
        new.__dict__.update(_experts_channel=channel, _experts_first=first, _experts_each=-(-count // spread))
        new.__dict__[_COUNT] = stop - first  # the native forward counts with it
        return new

    def dim_of_data(self, parameter: str) -> int:
        """Return the dim along which data parallelism divides a parameter: the one that is split over no other axis."""
        return next(dim for dim in (1, 2) if dim != self._slices_cuts[parameter].dim)

    # How many tokens travel is known when they do: no graph holds it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the native forward of each token's experts on the ranks that have them."""
        channel = self._experts_channel
        owners = top_k_index.div(self._experts_each, rounding_mode="floor")
        wanted = torch.zeros(len(owners), channel.size, dtype=torch.bool, device=owners.device).scatter_(
            1, owners, True
        )
        plan = plan_dispatch(wanted, channel)
        tokens, experts, weights = dispatch((hidden_states, top_k_index, top_k_weights), plan, factor=channel.size)
        return combine(self._computed(tokens, experts, weights), plan, factor=1 / channel.size)

    def _computed(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the sums (R, H) of what this rank's experts make of tokens, some of whose experts are elsewhere."""
        if not len(tokens):
            # Nobody else may wait for this rank: its part of the backward runs, and FSDP2 gets gradients to reduce.
            return touch(tokens, [weights, *self.parameters()]) if torch.is_grad_enabled() else tokens
        own = experts - self._experts_first
        row, place = ((own >= 0) & (own < getattr(self, _COUNT))).nonzero(as_tuple=True)
        # A row for each expert of a token: native forwards in all releases count with as many experts for each row.
        out = super().forward(tokens[row], own[row, place, None], weights[row, place, None])
        return torch.zeros_like(tokens).index_add(0, row, out)

    @override
    def extra_repr(self) -> str:
        """Describe the parts."""
        return f"{super().extra_repr()}, ep={self._experts_channel.size}"


def _experts_of(module: nn.Module) -> int:
    return next(p.size(0) for p in module._parameters.values() if p is not None)
