"""Choosing the attention of a transformers model by its ``attn_implementation``."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers.utils
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from typing_extensions import override

from shardcore.errors import NotSupportedError
from shardcore.plan.steps.base import ApplyContext, Commit, Step
from shardcore_transformers import _private

_HALVES = (torch.float16, torch.bfloat16)
#: Transformers' names of what the flash-attn packages bring, the best first, and the cards that each runs on: the first
#: number of a card's compute capability (8 is Ampere, 9 Hopper, 10 and 12 Blackwell).
_CARDS = {"flash_attention_4": (9, 10), "flash_attention_3": (9,), "flash_attention_2": (8, 9, 10, 12)}
#: Our name of torch's memory-efficient kernel, which is that of xformers.
_EFFICIENT = "xformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseAttention(Step):
    """The model computes attention by another of transformers' implementations.

    Attributes:
        implementation: transformers' name for it.
        why: what kept it from a better one, if anything did.
    """

    splits: ClassVar[bool] = False
    implementation: str
    why: str = ""

    @override
    def describe(self) -> str:
        return f"{self.implementation} ({self.why})" if self.why else self.implementation

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        chosen: Any = ctx.model.get_submodule(self.path)

        def commit() -> None:
            own_configurations(chosen)
            chosen.set_attn_implementation(self.implementation)
            models = (module for module in chosen.modules() if isinstance(module, PreTrainedModel))
            used = {type(model).__name__: model.config._attn_implementation for model in models}
            if kept := {name: used[name] for name in sorted(used) if used[name] != self.implementation}:
                # The plan would say what is not so.
                raise NotSupportedError(f"asked for {self.implementation}, transformers left {kept}")

        return commit


def own_configurations(model: nn.Module) -> list[Any]:
    """Give ``model`` configurations of its own, and return them: others that share them keep their attention."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if "config" in module.__dict__:
            module.config = copy.deepcopy(module.config, copies)
    return list(
        {id(module.config): module.config for module in model.modules() if "config" in module.__dict__}.values()
    )


def choose_flash_attention(model: PreTrainedModel, device_type: str, *, asked: bool | str) -> Step:
    """Return the step that makes ``model`` use the best flash attention that is installed and runs on this card.

    Where there is none, or none takes the masks of the model, who asked for flash attention gets torch's own kernels
    (``sdpa``: flash where no mask is passed, else memory-efficient), and the step says why.

    Raises:
        NotSupportedError: it is impossible (the message is the reason), or it was not asked for and the model uses
            eager attention, which somebody chose.
    """
    _private.require("flash attention")
    current = model.config._attn_implementation
    if device_type != "cuda":
        raise NotSupportedError(f"its kernels run on CUDA, and this is {device_type!r}")
    fixed = _fixed(model)
    for each in fixed:
        if not (made := each.config._attn_implementation).startswith("flash_attention"):
            raise NotSupportedError(
                f"transformers chooses the attention of a {type(each).__name__} when it is made, and this one has "
                f"{made!r} (make or load it with attn_implementation='flash_attention_2')"
            )
    if fixed:
        return ChooseAttention(path="", implementation=fixed[0].config._attn_implementation)
    if not asked and current == "eager":
        raise NotSupportedError("eager attention was chosen, which alone can return attention weights")
    if asked == _EFFICIENT:
        _require_sdpa(model, current)
        return ChooseAttention(path="", implementation=_EFFICIENT)
    found = _installed()
    if not getattr(model, "_supports_flash_attn", False):
        why = f"transformers has none for {type(model).__name__} (it stays at {current!r})"
    elif isinstance(asked, str) and asked not in found:
        why = f"{asked} is not installed, or does not run on this card; what is and does: {', '.join(found) or 'none'}"
    elif not found:
        why = "the flash-attn package is not installed (pip install flash-attn)"
    else:
        dtypes = sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point() and p.dtype not in _HALVES})
        # In float32 it runs under autocast, which is not known yet; who asks for it may mean that.
        if dtypes and (not asked or "torch.float64" in dtypes):
            raise NotSupportedError(
                f"it computes in float16 and bfloat16, and parameters are {', '.join(dtypes)} (load the model with "
                "dtype=torch.bfloat16)"
            )
        return ChooseAttention(path="", implementation=asked if isinstance(asked, str) else found[0])
    if asked is not True or not getattr(model, "_supports_sdpa", False):
        raise NotSupportedError(why)
    return ChooseAttention(path="", implementation="sdpa", why=why)


def _require_sdpa(model: PreTrainedModel, current: str) -> None:
    if not getattr(model, "_supports_sdpa", False):
        raise NotSupportedError(f"transformers has none for {type(model).__name__} (it stays at {current!r})")
    if _EFFICIENT not in AttentionInterface().valid_keys():
        AttentionInterface.register(_EFFICIENT, _efficient_attention)
        AttentionMaskInterface.register(_EFFICIENT, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _efficient_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute what ``sdpa`` computes, by torch's memory-efficient kernel alone, which takes masks and no shared heads.

    Args:
        module: the attention.
        query: (batch, heads, tokens, features).
        key: (batch, key and value heads, tokens, features).
        value: as ``key``.
        attention_mask: what is added to scores, or None.
        options: those of `transformers.integrations.sdpa_attention.sdpa_attention_forward`.

    Returns:
        (batch, tokens, heads, features), and None in the place of attention weights.
    """
    groups = query.shape[1] // key.shape[1]
    alone = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # its heads are not shared any more
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out: tuple[Tensor, None] = sdpa_attention_forward(
            alone, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **options
        )
    return out


def _fixed(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return ``model`` and those in it, as far as they stay at the attention that they were made with."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return [each for each in models if not each._can_set_attn_implementation()]


def _installed() -> list[str]:
    """Return transformers' names of what is installed and runs on this card, the best first."""
    card, _ = torch.cuda.get_device_capability()
    return [name for name, cards in _CARDS.items() if card in cards and _is_there(name)]


def _is_there(name: str) -> bool:
    # Older releases know no fourth version.
    known = getattr(transformers.utils, f"is_flash_attn_{name[-1]}_available", None)
    return known is not None and bool(known())
