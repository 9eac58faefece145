"""Choosing the attention of a transformers model by its ``attn_implementation``."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from typing_extensions import override

from shardcore.errors import NotSupportedError
from shardcore.plan.steps import ApplyContext, Commit, Step
from shardcore_transformers import _private

__all__ = ["ChooseAttention", "choose_flash_attention"]

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseAttention(Step):
    """The model computes attention by another of transformers' implementations."""

    splits: ClassVar[bool] = False
    implementation: str

    @override
    def describe(self) -> str:
        return self.implementation

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        chosen: Any = ctx.model.get_submodule(self.path)

        def commit() -> None:
            # The configuration may be shared with another model, which keeps its attention.
            copies: dict[int, Any] = {}
            for module in chosen.modules():
                if "config" in module.__dict__:
                    module.config = copy.deepcopy(module.config, copies)
            chosen.set_attn_implementation(self.implementation)

        return commit


def choose_flash_attention(model: PreTrainedModel, device_type: str, *, asked: bool) -> Step:
    """Return the step that makes ``model`` use flash-attn: version 3 where it is installed and runs, else 2.

    Raises:
        NotSupportedError: it is impossible (the message is the reason), or it was not asked for and the model uses
            eager attention, which somebody chose.
    """
    _private.require("flash attention")
    current = model.config._attn_implementation
    if not getattr(model, "_supports_flash_attn", False):
        raise NotSupportedError(f"transformers has none for {type(model).__name__} (it stays at {current!r})")
    if device_type != "cuda":
        raise NotSupportedError(f"the flash-attn package runs on CUDA, and this is {device_type!r}")
    if fixed := _fixed(model):
        if not current.startswith("flash_attention"):
            raise NotSupportedError(
                f"transformers chooses the attention of a {fixed} when it is made, and this one has {current!r} (make "
                "or load it with attn_implementation='flash_attention_2')"
            )
        return ChooseAttention(path="", implementation=current)
    version = _installed()
    if version is None:
        raise NotSupportedError("the flash-attn package is not installed (pip install flash-attn)")
    dtypes = sorted({str(p.dtype) for p in model.parameters() if p.is_floating_point() and p.dtype not in _HALVES})
    # In float32 it runs under autocast, which is not known yet; who asks for it may mean that.
    if dtypes and (not asked or "torch.float64" in dtypes):
        raise NotSupportedError(
            f"it computes in float16 and bfloat16, and parameters are {', '.join(dtypes)} (load the model with "
            "dtype=torch.bfloat16)"
        )
    if not asked and current == "eager":
        raise NotSupportedError("eager attention was chosen, which alone can return attention weights")
    return ChooseAttention(path="", implementation=version)


def _fixed(model: PreTrainedModel) -> str | None:
    """Return the class of a model in ``model``, or its own, that stays at the attention it was made with, or None."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next((type(each).__name__ for each in models if not each._can_set_attn_implementation()), None)


def _installed() -> str | None:
    """Return transformers' name for the newest flash-attn that is installed and runs on this device, or None."""
    if is_flash_attn_3_available() and torch.cuda.get_device_capability()[0] == 9:
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None
