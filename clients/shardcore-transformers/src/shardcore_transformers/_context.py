"""Attention of transformers' models between tokens that are divided over ranks.

Models look their attention up in a table (``ALL_ATTENTION_FUNCTIONS``) by ``config._attn_implementation``, and masks in
another one. Both have an entry of this module for each implementation that it can stand before: that of the mask keeps
what transformers would make a tensor of S x S of, and that of the attention asks for the parts that it needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardcore.errors import NotSupportedError
from shardcore.nn.context.shard import ContextShard, DividedAttention, crosses, shard_of
from shardcore_transformers._attention import own_configurations
from shardcore_transformers._blocks import TokenMask
from shardcore_transformers._divided import attend
from shardcore_transformers._prefill import filling

#: The implementations that may compute heads whose tokens are all on one rank.
_INNER = ("sdpa", "eager")
_PREFIX = "shardcore_context_"

#: What every attention is given, and `softcap`, on which that of sdpa raises.
_GIVEN = frozenset({"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"})
_SOFTCAP = "softcap"

#: The name by which the code of models knows the table.
_TABLE = "ALL_ATTENTION_FUNCTIONS"


_OTHER = (
    "a mask of more keys than tokens, or by a function of the caller's own, under context parallelism: shard without "
    "context_parallel_size"
)


class _Mask(TokenMask):
    """What tokens of a call see, as a function of their positions.

    Args:
        how: the arguments with which transformers asks for a mask.
        inner: the implementation that it asks for.
    """

    def __init__(self, how: Mapping[str, Any], inner: str) -> None:
        self._how, self._inner = how, inner
        function, padding = how["mask_function"], how.get("attention_mask")
        known = {masking_utils.causal_mask_function: "causal", masking_utils.bidirectional_mask_function: "full"}
        plain = function in known and (padding is None or bool(padding.all()))
        super().__init__(known[function] if plain else "other")  # type: ignore[arg-type]  # one of the three

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return what tokens at these positions see, as booleans."""
        if self._how["kv_length"] != self._how["q_length"]:
            raise NotSupportedError(_OTHER)
        return self.across(queries, keys)

    def across(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return what tokens at these positions see of states at others, which may be those of another stack."""
        how = self._how
        function, padding = how["mask_function"], how.get("attention_mask")
        if how.get("use_vmap"):
            raise NotSupportedError(_OTHER)
        if padding is not None:
            function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padding))
        rows = torch.arange(how["batch_size"], device=queries.device)
        heads = torch.zeros(1, dtype=torch.long, device=queries.device)
        seen: Tensor = function(
            rows[:, None, None, None], heads[:, None, None], queries[None, None, :, None], keys[None, None, None, :]
        )
        return seen.expand(how["batch_size"], -1, len(queries), len(keys))

    def whole(self) -> Tensor | None:
        """Return the mask that transformers would have made."""
        made: Tensor | None = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[self._inner](**self._how)
        return made


class _Given(TokenMask):
    """A mask that the caller has made, (B or 1, H or 1, S, S)."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__("other")
        self._mask = mask

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the part of it for tokens at these positions."""
        return self._mask[:, :, queries][..., keys]


class _OfKeys(_Given):
    """Which keys tokens see, (B or 1, H or 1, 1, S), of those before them."""

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return it for tokens at these positions."""
        return self._mask[..., keys] & (queries[:, None] >= keys[None])


class _None(TokenMask):
    """No mask: what tokens see is the attention's own affair."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__("causal" if causal else "full")

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return what tokens at these positions see."""
        before = queries[:, None] >= keys[None]
        return (before if self.kind == "causal" else torch.ones_like(before))[None, None]


class _Alone:
    """An attention module whose keys are those of each query."""

    num_key_value_groups = 1

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, Tensor):
            raise NotSupportedError(
                f"the attention of {type(self._module).__name__} reads {name}, of which context parallelism does not "
                "know the heads and tokens: shard without context_parallel_size"
            )
        return value


def _mask_function(inner: str) -> Callable[..., _Mask]:
    def mask(**how: Any) -> _Mask:
        return _Mask(how, inner)

    return mask


def _attention_function(inner: str) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        shard = shard_of(module)
        if shard is None or shard.now is None:
            mask = attention_mask.whole() if isinstance(attention_mask, _Mask) else attention_mask
            native = _native(inner, module)
            return native(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)  # type: ignore[no-any-return]
        if crosses(module):
            mask = _rows(inner, shard, attention_mask, query, key)
            return _native(inner, module)(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)  # type: ignore[no-any-return]
        return _divided(
            inner, shard, module, (query, key, value), attention_mask, scaling=scaling, dropout=dropout, **kwargs
        ), None

    return attention


def _rows(inner: str, shard: ContextShard, mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what this rank's tokens see of the states of another stack, of which it has all."""
    places = shard.now
    assert places is not None  # or else nothing is divided
    if isinstance(mask, Tensor):
        return shard.own(mask, places, -2)
    if mask is None or mask.kind == "full":
        return None
    count = functools.partial(torch.arange, device=query.device)
    own = torch.cat([count(start, stop) for start, stop in places.ranks[shard.rank]])
    return _as(inner, mask.across(own, count(key.size(2))), query)


def sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Attend by torch's scaled dot products, to the tokens of all ranks where they are divided over them.

    It is for attentions of packs in the place of such as do not look theirs up in transformers' table.

    Args:
        module: the attention, whose `plan_attends` is True.
        query: (B, H, L, D).
        key: (B, H, L, D).
        value: (B, H, L, D).
        mask: (B or 1, H or 1, S, S) of all tokens of the call, True where a query sees a key; None: ``is_causal``.
            Where tokens are divided it may be (B or 1, H or 1, 1, S), for keys alone.
        is_causal: without a mask, or with one for keys alone, tokens see those before them alone.

    Returns:
        (B, L, H, D).
    """
    seen: Any = mask
    if mask is not None and is_causal and mask.size(-2) == 1 < mask.size(-1):
        seen = _OfKeys(mask)
    out, _ = _attention_function("sdpa")(module, query, key, value, seen, is_causal=is_causal)
    return out


def divides(module: nn.Module) -> int | None:
    """Return how many tokens the call has of which an attention has a part; None if it has all."""
    shard = shard_of(module)
    return None if shard is None or shard.now is None else shard.now.length


def _divided(
    inner: str,
    shard: ContextShard,
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    *,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    """Attend to the tokens of all ranks."""
    assert shard.now is not None  # or else nothing is divided
    q, k, v = qkv
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    mask: TokenMask = attention_mask
    if isinstance(attention_mask, Tensor):
        mask = _Given(attention_mask)
    elif attention_mask is None:
        mask = _None(causal=causal)
    native = _native(inner, module)
    # What it has no name for, it leaves alone.
    known = ({_SOFTCAP} | inspect.signature(native).parameters.keys()) - _GIVEN
    further = {name: value for name, value in kwargs.items() if name in known and value is not None}
    computes: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    if dropout or further or inner != "sdpa":
        if shard.groups.ring is not None:
            what = f"dropout {dropout}" if dropout else ", ".join(sorted(further)) or f"{inner} attention"
            raise NotSupportedError(
                f"{type(module).__name__} computes with {what}, which ring_attn does not: say "
                "context_parallel_mode='all_to_all', or leave that out (attention_dropout=0.0, "
                "attn_implementation='sdpa')"
            )
        if tensors := [name for name, value in further.items() if isinstance(value, Tensor)]:
            raise NotSupportedError(
                f"{type(module).__name__} gives its attention {', '.join(tensors)}, of which context parallelism does "
                "not know the heads and tokens: shard without context_parallel_size"
            )
        alone = _Alone(module)

        def computes(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
            out: Tensor = native(
                alone, q, k, v, _as(inner, seen, q), scaling=scaling, dropout=dropout, is_causal=False, **further
            )[0]
            return out

    shard.attended += 1
    scale = q.size(-1) ** -0.5 if scaling is None else scaling
    return attend(q, k, v, mask, shard.groups, shard.now, scale=scale, inner=computes)


def _as(inner: str, seen: Tensor, like: Tensor) -> Tensor:
    """Return a mask in the form that an implementation takes."""
    if inner == "sdpa" or seen.dtype != torch.bool:
        return seen
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, torch.finfo(like.dtype).min)


def _native(inner: str, module: nn.Module) -> Callable[..., Any]:
    """Return the function that the table has for an implementation; that of eager is where the class is."""
    if inner != "eager":
        return ALL_ATTENTION_FUNCTIONS[inner]  # type: ignore[no-any-return]
    return vars(inspect.getmodule(_defining(type(module))))["eager_attention_forward"]  # type: ignore[no-any-return]


def _defining(cls: type) -> type:
    """Return the class of a library that wrote the forward of ``cls``."""
    written = ("transformers.", "transformers_modules.")
    return next(base for base in cls.__mro__ if base.__module__.startswith(written) and "forward" in vars(base))


class _Context(DividedAttention):
    arguments: Mapping[str, int | None] = {
        "attention_mask": None,
        "encoder_attention_mask": None,
        "encoder_hidden_states": None,
        "cache_position": -1,
        "position_embeddings": -2,
        "position_ids": -1,
        # Of the remote code of ChatGLM2, (1 or B, S, D / 4, 2), and of the first Qwen, (1, S, 1, D).
        "rotary_pos_emb": -3,
        "rotary_pos_emb_list": -3,
    }
    caches = ("past_key_values", "cache")
    uses_cache = "use_cache"

    def lacks(self) -> str | None:
        """Say what the installed release lacks, or return None."""
        if {"q_length", "q_offset"} <= inspect.signature(masking_utils.sdpa_mask).parameters.keys():
            return None
        return "this release of transformers makes masks in another way (5.24 is known)"

    def reason(self, model: nn.Module) -> str | None:
        """Say why nothing can be divided in a model whose policy does not say where, if that is known."""
        for module in model.modules():
            kind = type(module)
            if "forward" not in vars(kind) or not kind.__name__.endswith("Attention"):
                continue
            names = _names(inspect.unwrap(vars(kind)["forward"]).__code__)
            if "position_bias" in names:
                return f"{kind.__name__} adds a bias for positions to its scores, which has all tokens of a call"
            if _TABLE not in names and names & {"bmm", "matmul", "scaled_dot_product_attention", "softmax"}:
                return f"{kind.__name__} computes attention by itself, not by a function of transformers' table"
        return None

    def problem(self, model: nn.Module, attentions: tuple[nn.Module, ...], *, ring: bool) -> str | None:
        """Say why these attentions of a model cannot be divided, or return None."""
        if (lacks := self.lacks()) is not None:
            return lacks
        config: Any = model.config
        if any(getattr(config, name, None) is not None for name in getattr(config, "sub_configs", {})):
            return f"{type(model).__name__} is made of several models"
        if getattr(config, "add_cross_attention", False):
            return f"{type(model).__name__} attends to the states of an encoder too, of which each rank has all tokens"
        inner = config._attn_implementation
        if attentions and inner not in _INNER:
            return f"the model computes attention by {inner!r}, and {', '.join(_INNER)} are known"
        if attentions and ring and inner != "sdpa":
            return (
                "ring_attn computes what sdpa does; load the model with attn_implementation='sdpa', or use all_to_all"
            )
        for kind in dict.fromkeys(map(type, attentions)):
            if not _looks_up(_defining(kind)):
                return f"{kind.__name__} does not look its attention up in transformers' table"
        return None

    def is_cache(self, value: Any) -> bool:
        """Tell whether an output of a model holds keys and values."""
        return isinstance(value, Cache)

    def filling(self, cache: Any) -> Callable[[ContextShard], None] | None:
        """Return what gives a cache that is filled by a call with divided tokens those of all ranks."""
        return filling(cache)

    def divide(self, model: nn.Module) -> None:
        """Let attentions that have a shard attend to tokens of other ranks."""
        for config in own_configurations(model):
            if getattr(config, "_attn_implementation", None) in _INNER:
                config._attn_implementation = f"{_PREFIX}{config._attn_implementation}"


def _looks_up(cls: Any) -> bool:
    """Tell whether the forward that a class defines looks an attention up in the table."""
    return _TABLE in _names(inspect.unwrap(cls.forward).__code__)


def _names(code: Any) -> set[str]:
    return {*code.co_names, *code.co_varnames}.union(*(_names(each) for each in code.co_consts if inspect.iscode(each)))


for _inner in _INNER:
    AttentionInterface.register(f"{_PREFIX}{_inner}", _attention_function(_inner))
    AttentionMaskInterface.register(f"{_PREFIX}{_inner}", _mask_function(_inner))

CONTEXT = _Context()
