"""`torch.nn.MultiheadAttention` over several ranks: each computes its heads, and their part of the output projection.

The native module hands its bare parameters to one function, which takes the width of the input for that of all heads.
So this one computes by itself what that function does. ``out_proj``, which the native module reads but never calls, is
a row linear here, and is called.

Shapes: B rows, L queries, S keys, E features; H heads on all ranks together, h on this rank, n = h * E / H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.comm.collectives import copy_to_tp, gather_from_tp, reduce_from_tp
from shardcore.comm.dtensor_params import expect_dtensor, read_local, read_partial
from shardcore.comm.exchange import Exchange, exchange_rows
from shardcore.comm.strided import Runs, install, torch_lacks
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext, as_context
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import ExchangedLayout, Layout, ReplicatedLayout, SegmentedLayout, ShardedLayout
from shardcore.nn.linear.members import take_rows
from shardcore.nn.linear.parallel import RowLinear
from shardcore.nn.mixin import native_class
from shardcore.nn.region.flow import has_entered
from shardcore.nn.sequence.shard import enter_region

#: What is attended to: the queries' own states, other states for keys and values alike, or any three tensors.
Of = Literal["self", "memory", "any"]

_PACKED = "in_proj_weight"
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_WHOLE = ("in_proj_bias", "bias_k", "bias_v")


def _heads_at(module: nn.Module, ranks: int, rank: int) -> range:
    """Return the heads of a rank: where the ranks do not divide them, the first ones have one more."""
    each, more = divmod(_number(module, "num_heads"), ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _rows_at(module: nn.Module, ranks: int, rank: int, projections: int) -> Runs:
    """Return the rows of a rank's heads in a weight of so many projections, one after the other."""
    size, each = _number(module, "embed_dim"), _number(module, "head_dim")
    heads = _heads_at(module, ranks, rank)
    return tuple((size * i + heads.start * each, size * i + heads.stop * each) for i in range(projections))


def _number(module: nn.Module, name: str) -> int:
    return int(getattr(module, name))


def _is_even(module: nn.Module, ranks: int) -> bool:
    return _number(module, "num_heads") % ranks == 0


def output_options(module: nn.Module, ranks: int) -> dict[str, Any]:
    """Return the options with which the output projection of an attention becomes a `RowLinear`."""
    if _is_even(module, ranks):
        return {}
    return {"used": tuple(_rows_at(module, ranks, rank, 1) for rank in range(ranks))}


class SplitAttention(ParallelMixin):
    """Attention of which each rank has some heads.

    Queries (B, L, E), keys (B, S, kdim) and values (B, S, vdim), or the same as the native module takes them, equal on
    all ranks; or this rank's tokens of them where the sequence is split. The output likewise. Attention weights are
    returned whole: averaged with an all-reduce, or by head with an all-gather.

    ``in_proj_weight`` (3E, E) is three segments, each split by heads; weights apart are split by heads. The biases are
    whole on every rank, which uses its part, and their gradients are summed in one all-reduce. Where the ranks do not
    divide the heads, weights lie in equal parts, and ranks exchange the rows of their heads.

    Options:
        of: what is attended to, for the number of products and of entries.
        entered: keys and values have entered above, for all layers of a decoder at once.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"entered", "of"})

    _attends_to: Of
    _has_entered: bool
    #: Of this rank.
    _heads: range
    #: The rows of a weight, or of a bias, of all three projections that this rank uses.
    _rows: Runs
    #: How this rank gets the rows of each weight; None if it holds them.
    _exchanges: tuple[Exchange, ...] | None
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, **options: Any) -> str | None:
        if not isinstance(module, nn.MultiheadAttention):
            return f"{cls.__name__} replaces torch.nn.MultiheadAttention, got {type(module).__name__}"
        if native_class(type(module)).forward is not nn.MultiheadAttention.forward:
            return f"{type(module).__name__} computes something else than torch.nn.MultiheadAttention"
        if module.num_heads < ranks:
            return f"{module.num_heads} heads cannot be split over {ranks} ranks: each needs one"
        if module._parameters.get(_PACKED) is None and options.get("of") == "self":
            return "its keys and values have a width of their own, so that it cannot attend to its queries' states"
        return torch_lacks() if module._parameters.get(_PACKED) is not None and not module.num_heads % ranks else None

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        even = _is_even(module, ranks)
        layouts: dict[str, Layout] = {_PACKED: SegmentedLayout(3) if even else ExchangedLayout(0)}
        layouts |= dict.fromkeys(_APART, ShardedLayout(0) if even else ExchangedLayout(0))
        layouts |= dict.fromkeys(_WHOLE, ReplicatedLayout(partial_gradient=True))
        return {name: layout for name, layout in layouts.items() if module._parameters.get(name) is not None}

    @classmethod
    @override
    def plan_enters(cls, **options: Any) -> bool:
        return True

    @classmethod
    @override
    def plan_on_split_tokens(cls, *, of: Of = "any", **options: Any) -> str | None:
        return "whether keys and values are split along the sequence is not known" if of == "any" else None

    @classmethod
    @override
    def plan_collectives(
        cls, site: Site, *, of: Of = "any", entered: bool = False, **options: Any
    ) -> Iterator[Collective]:
        if any(isinstance(site.layout(name), ExchangedLayout) for name in (_PACKED, *_APART)):
            yield forward(site.path, "all_to_all", "rows of its weights")
            yield backward(site.path, "all_to_all", "gradients of these rows")
        if site.split:
            yield forward(site.path, "all_gather", "(B, S/tp, H) input")
            yield backward(site.path, "reduce_scatter", "(B, S, H) input gradient")
        else:
            yield backward(site.path, "all_reduce", "(B, S, H) input gradient")
        for name in {"self": (), "memory": ("memory",), "any": ("key", "value")}[of] if not entered else ():
            yield backward(site.path, "all_reduce", f"gradient of its {name}")
        if site.sums_at_once and any(site.layout(name) is not None for name in _WHOLE):
            yield backward(site.path, "all_reduce", "gradients of its biases")

    @classmethod
    @override
    def from_native_module(
        cls,
        module: nn.Module,
        process_group: ProcessGroup | list[ProcessGroup] | DeviceMesh | ShardContext | None = None,
        **options: Any,
    ) -> Self:
        """Replace an attention, and the output projection in it, in place, and return it."""
        context = as_context(process_group)
        new = super().from_native_module(module, context, **options)
        RowLinear.from_native_module(new.get_submodule("out_proj"), context, **output_options(new, context.size))
        return new

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, of: Of = "any", entered: bool = False, **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        ranks, packed = context.size, new._parameters.get(_PACKED) is not None
        exchanges: tuple[Exchange, ...] | None = None
        if not _is_even(new, ranks):
            projections, weights = (3, 1) if packed else (1, 3)
            used = tuple(_rows_at(new, ranks, rank, projections) for rank in range(ranks))
            exchanges = (Exchange(used, _number(new, "embed_dim") * projections, context.rank),) * weights
        elif packed:
            install()
        new.__dict__.update(
            _attends_to=of,
            _has_entered=entered,
            _heads=_heads_at(new, ranks, context.rank),
            _rows=_rows_at(new, ranks, context.rank, 3),
            _exchanges=exchanges,
        )
        return new

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the attention weights if they are needed, as the native module does.

        Nested tensors are refused, and keys and values that are not those that the policy says.
        """
        if any(x.is_nested for x in (query, key, value)):
            raise NotSupportedError(
                f"{type(self).__name__}: nested tensors are not split over ranks; pass padded ones and key_padding_mask"
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: pass the mask too")
        batched = query.ndim == 3
        weights, bias, extra = self._read()
        q, k, v = map(self._by_heads, self._projected(query, key, value, weights, bias))
        # The hint stands for the mask only where nothing else has to see it, as in torch.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._merged(None if causal else attn_mask, key_padding_mask, q, k.size(2))
        if added := self._added(k, extra):
            k, v = (torch.cat([x, *more], 2) for x, more in zip((k, v), zip(*added, strict=True), strict=True))
            mask = None if mask is None else F.pad(mask, (0, len(added)))
        out, attended = self._attend(q, k, v, mask, causal=causal, need_weights=need_weights)
        found = None if attended is None else self._gathered(attended, average=average_attn_weights)
        out = self.out_proj(self._by_tokens(out, batched=batched))  # type: ignore[operator]  # a row linear
        return out, found if found is None or batched else found.squeeze(0)

    def _merged(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """Return both masks as what is added to the scores of this rank's heads."""
        masks = []
        if attn_mask is not None:
            every = _mask_of_queries(self._whole(attn_mask), (q.size(0), _number(self, "num_heads"), q.size(2), keys))
            heads = self._heads
            masks.append(every if every.size(1) == 1 else every[:, heads.start : heads.stop])
        if padding is not None:
            masks.append(_mask_of_keys(self._whole(padding), q.size(0), keys))
        added = [_additive(mask, q.dtype) for mask in masks]
        return sum(added[1:], added[0]) if added else None

    def _read(self) -> tuple[tuple[Tensor, ...], Tensor | None, list[Tensor]]:
        """Return this rank's rows of the weights and of their bias, and its heads' part of the keys that are added."""
        channel, own = self._shard_context.channel, self._parameters
        parameters = [p for name in (_PACKED, *_APART) if (p := own.get(name)) is not None]
        exchanges = self._exchanges
        for parameter in parameters:
            expect_dtensor(parameter)
        weights = read_local(*parameters) if exchanges is None else exchange_rows(channel, exchanges, parameters)
        whole = {name: p for name in _WHOLE if (p := own.get(name)) is not None}
        read = read_partial(channel, *whole.values(), deferred=self._shard_context.defers) if whole else ()
        found = dict(zip(whole, read, strict=True))
        bias = take_rows(found["in_proj_bias"], self._rows) if "in_proj_bias" in found else None
        heads = self._heads
        added = [
            found[name].view(_number(self, "num_heads"), -1)[heads.start : heads.stop]
            for name in _WHOLE[1:]
            if name in found
        ]
        return tuple(weights), bias, added

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, weights: tuple[Tensor, ...], bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Enter with the states and return queries, keys and values (..., n) of this rank's heads."""
        count = len(self._heads) * _number(self, "head_dim")
        if self._attends_to == "self":
            self._require_same("its key and its query", query, key)
            self._require_same("its value and its query", query, value)
            return tuple(F.linear(self._enter(query), weights[0], bias).split(count, -1))
        apart = weights if len(weights) == 3 else weights[0].split(count)
        biases = (None,) * 3 if bias is None else bias.split(count)
        if self._attends_to == "memory":
            self._require_same("its value and its key", key, value)
            memory = self._beside(key)
            states = (self._enter(query), memory, memory)
        else:
            states = (self._enter(query), self._beside(key), self._beside(value))
        return tuple(map(F.linear, states, apart, biases))

    def _require_same(self, which: str, one: Tensor, other: Tensor) -> None:
        """Refuse two tensors where the policy says that they are one; a hook may have made another object of it."""
        if one is other or torch.compiler.is_compiling():
            return
        if one.shape != other.shape or one.data_ptr() != other.data_ptr():
            raise NotSupportedError(
                f"{type(self).__name__}: {which} are two tensors, where the policy says that they are one: "
                f'attention(..., of="{self._attends_to}"). Say of="any" for this module.'
            )

    def _enter(self, x: Tensor) -> Tensor:
        """Enter with the states that the output is added to, or with this rank's tokens of them."""
        return enter_region(x, self._shard_context.channel, self._shard_sequence, type(self).__name__)

    def _beside(self, x: Tensor) -> Tensor:
        """Enter with states that all ranks have whole, unless they have entered above."""
        if not self._has_entered:
            return self._whole(x)
        if x.requires_grad and torch.is_grad_enabled() and backward_task() == -1 and not has_entered(x):
            raise NotSupportedError(
                f"{type(self).__name__}: the gradient of its keys would be this rank's summand, since they enter where "
                "the decoder around it is called. Call the decoder, not a layer of it."
            )
        return x

    def _whole(self, x: Tensor) -> Tensor:
        return copy_to_tp(x, self._shard_context.channel) if torch.is_grad_enabled() and x.requires_grad else x

    def _by_heads(self, x: Tensor) -> Tensor:
        """Return (B, h, L, n / h) of (B, L, n), (L, B, n) or (L, n)."""
        x = x.unflatten(-1, (len(self._heads), -1))
        if x.ndim == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _by_tokens(self, x: Tensor, *, batched: bool) -> Tensor:
        """Return what `_by_heads` was given."""
        if not batched:
            return x.squeeze(0).transpose(0, 1).flatten(-2)
        return (x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)

    def _added(self, k: Tensor, extra: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the keys and values (B, h, 1, n / h) that are attended to beside those of the states."""
        shape = (k.size(0), k.size(1), 1, k.size(3))
        found = [tuple(x.view(1, *shape[1:]).expand(shape) for x in extra)] if extra else []
        return [*found, *[(k.new_zeros(shape),) * 2] * bool(self.add_zero_attn)]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of each head, and its attention weights if they are needed."""
        rate = float(self.dropout) if self.training else 0.0  # type: ignore[arg-type]  # a number, as torch sets it
        forks = bool(rate) and not self._shard_context.random.forking
        if forks:
            self._shard_context.random.fork(id(self))
        try:
            if not need_weights:
                return F.scaled_dot_product_attention(q, k, v, mask, rate, causal), None
            scores = q * math.sqrt(1.0 / q.size(-1)) @ k.transpose(-2, -1)
            attended = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
            return attended @ v, attended
        finally:
            if forks:
                self._shard_context.random.join(id(self))

    def _gathered(self, attended: Tensor, *, average: bool) -> Tensor:
        """Return the attention weights of all heads: (B, L, S) on average, or (B, H, L, S)."""
        channel = self._shard_context.channel.exact
        if average:
            return reduce_from_tp(attended.sum(1) / _number(self, "num_heads"), channel)
        return gather_from_tp(
            attended, channel, 1, [len(_heads_at(self, channel.size, rank)) for rank in range(channel.size)]
        )


def _mask_of_queries(mask: Tensor, scores: tuple[int, int, int, int]) -> Tensor:
    """Return a mask (L, S) as (1, 1, L, S), one (B * H, L, S) as (B, H, L, S); refuse others, as torch does."""
    rows, heads, queries, keys = scores
    if mask.shape == (queries, keys):
        return mask[None, None]
    if mask.shape == (rows * heads, queries, keys):
        return mask.reshape(scores)
    wanted = f"({queries}, {keys}) or ({rows * heads}, {queries}, {keys}), which is batch * all heads"
    raise RuntimeError(f"attn_mask has the shape {tuple(mask.shape)}; wanted {wanted}")


def _mask_of_keys(mask: Tensor, rows: int, keys: int) -> Tensor:
    """Return a mask (B, S), or (S) without a batch, as (B, 1, 1, S); refuse others, as torch does."""
    if mask.shape not in ((rows, keys), (keys,) if rows == 1 else (rows, keys)):
        raise RuntimeError(f"key_padding_mask has the shape {tuple(mask.shape)}; wanted ({rows}, {keys})")
    return mask.reshape(rows, 1, 1, keys)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: of a mask of bools, minus infinity where it is True; refuse whole numbers."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise RuntimeError(f"masks of attention are bool or floating, not {mask.dtype}")
    return mask
