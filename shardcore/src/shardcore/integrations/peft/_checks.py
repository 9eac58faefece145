"""Which methods and layers of PEFT have a sharded form, and what is said of the others before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from peft import PeftType, PromptEncoderReparameterizationType
from peft.tuners import tuners_utils
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.layer import Conv1d, Conv2d, Embedding, Linear, ParamWrapper
from peft.tuners.lora.variants import (
    DoraConv1dVariant,
    DoraConv2dVariant,
    DoraEmbeddingVariant,
    DoraLinearVariant,
)
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import ModulesToSaveWrapper
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.integrations import _private
from shardcore.nn import ColumnLinear, Replicated, RowLinear, VocabEmbedding
from shardcore.nn.experts.slices import Slices

__all__ = ["check_base", "check_layer", "check_method", "check_new", "check_targets", "trains_beside"]

_MERGE = "merge the adapter before shard() (merge_and_unload() in PEFT), or train it unsharded"

_PARAMETERS = (
    "target_parameters adapts weights that are no modules, such as those of all experts, and cannot be sharded. Leave "
    "it out (target_modules for attention can stay), or merge the adapter before shard() (merge_and_unload() in PEFT)"
)

#: What a module has to become for an adapter to have a form there, or exactly `Replicated`.
_BASES = (ColumnLinear, RowLinear, VocabEmbedding)

#: Methods whose parameters are outside of the model, which sees what they make as its input.
_OUTSIDE = (PeftType.PROMPT_TUNING, PeftType.P_TUNING, PeftType.PREFIX_TUNING)
#: Tasks for which PEFT trains the head of the model beside prompts.
_CLASSIFIES = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_INSIDE = (PeftType.LORA, PeftType.IA3)

#: The variants of LoRA that have a sharded form.
_VARIANTS = (DoraLinearVariant, DoraEmbeddingVariant, DoraConv1dVariant, DoraConv2dVariant)

#: How LoRA begins without a look at the weights of the base.
_BLIND = (True, False, "gaussian")


def check_method(config: Any, name: str, *, ranks: int, replicas: int) -> None:
    """Refuse a method that has no sharded form.

    Args:
        config: the settings of the adapter.
        name: of the adapter.
        ranks: how many there are on ``tp``.
        replicas: how many data-parallel replicas there are.

    Raises:
        NotSupportedError: it has none.
    """
    method = getattr(config.peft_type, "value", config.peft_type)
    several = ranks * replicas > 1 and config.is_prompt_learning
    if several and config.peft_type not in _OUTSIDE:
        known = ", ".join(str(kind.value) for kind in _OUTSIDE)
        raise NotSupportedError(
            f"the adapter {name!r} is {method}; of prompts that are outside of the model these are known: {known}"
        )
    lstm = getattr(config, "encoder_reparameterization_type", None) == PromptEncoderReparameterizationType.LSTM
    if several and lstm and (trained := trains_beside(config)):
        raise NotSupportedError(
            f"the adapter {name!r} is {method} and trains a part of the sharded model too ({trained}): one optimizer "
            "takes no plain parameters, which those of an LSTM have to be, beside them. Leave "
            "encoder_reparameterization_type='LSTM' out, or use LORA"
        )
    if ranks > 1 and config.is_prompt_learning and getattr(config, "encoder_dropout", 0):
        raise NotSupportedError(
            f"the adapter {name!r} has encoder_dropout={config.encoder_dropout}, outside of the model, where each rank "
            "would draw another mask: leave it out"
        )
    if ranks > 1 and config.peft_type not in (*_OUTSIDE, *_INSIDE):
        known = ", ".join(str(kind.value) for kind in (*_INSIDE, *_OUTSIDE))
        raise NotSupportedError(f"the adapter {name!r} is {method}, and these can be sharded: {known}; {_MERGE}")


def trains_beside(config: Any) -> Any:
    """Return what prompts train of the model beside themselves, by its names or the task; None if that is nothing."""
    task = config.task_type if config.task_type in _CLASSIFIES else None
    return (config.is_prompt_learning and (getattr(config, "modules_to_save", None) or task)) or None


def check_new(config: Any, name: str, *, several: bool) -> None:
    """Refuse settings that make an adapter of the values of the base, which no rank has.

    Args:
        config: the settings of the adapter.
        name: of the adapter.
        several: whether the model has several ranks.

    Raises:
        NotSupportedError: they do.
    """
    if several and (trained := trains_beside(config)):
        raise NotSupportedError(
            f"the adapter {name!r} has prompts, and trains a copy of a part of the model ({trained}): attach it before "
            "shard(), as shard(get_peft_model(model, config))"
        )
    way = getattr(config, "init_lora_weights", True)
    if way not in _BLIND:
        raise NotSupportedError(
            f"the adapter {name!r} begins with what init_lora_weights={way!r} computes of whole weights, of which each "
            "rank has a part: attach it before shard(), as shard(get_peft_model(model, config))"
        )


def check_base(where: str, made: Collection[type]) -> None:
    """Refuse an adapter at a module of which the ranks of ``tp`` get parts that no adapter has.

    Args:
        where: its path.
        made: the classes that it is given when the model is sharded, or has; none if nothing is known yet.

    Raises:
        NotSupportedError: it is such a one, as an expert is.
    """
    if made and not any(kind is Replicated or issubclass(kind, _BASES) for kind in made):
        kinds = ", ".join(kind.__qualname__ for kind in made)
        raise NotSupportedError(
            f"an adapter at {where}, of which each rank gets a part as {kinds}: adapters of experts cannot be sharded. "
            "Leave it out of target_modules (attention, routers and shared experts can stay there), or merge the "
            "adapter before shard() (merge_and_unload() in PEFT)"
        )


def check_targets(model: nn.Module, config: Any, name: str) -> None:
    """Refuse an adapter whose settings name parameters, or modules of a sharded model that can have none.

    Raises:
        NotSupportedError: they do.
    """
    if getattr(config, "target_parameters", None):
        raise NotSupportedError(f"the adapter {name!r} has target_parameters={config.target_parameters}; {_PARAMETERS}")
    if getattr(config, "target_modules", None) is None:
        return
    _private.require_peft()
    wanted = tuners_utils._maybe_include_all_linear_layers(copy.deepcopy(config), model)
    for path, module in model.named_modules():
        if isinstance(module, Slices) and check_target_module_exists(wanted, path):
            check_base(path, [Slices])


def check_layer(layer: nn.Module, where: str) -> None:
    """Refuse a layer that has no sharded form, whatever its base will be.

    Raises:
        NotSupportedError: it has none.
    """
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if isinstance(layer, ParamWrapper):
        raise NotSupportedError(f"{where} has an adapter of its parameter {layer.parameter_name}; {_PARAMETERS}")
    if isinstance(layer._modules.get("base_layer"), BaseTunerLayer):
        raise NotSupportedError(
            f"{where} has one adapter layer around another ({kind}), which cannot be sharded; {_MERGE}"
        )
    if isinstance(layer, ModulesToSaveWrapper):
        return
    if not isinstance(layer, Linear | Embedding | Conv2d | Conv1d | IA3Linear):
        raise NotSupportedError(
            f"{where} is a {kind}, and nothing is known about how it is "
            "sharded: LoRA and IA3 of linears, and LoRA of embeddings, are; "
            f"{_MERGE}"
        )
    variants = {} if isinstance(layer, IA3Linear) else layer.lora_variant
    kinds = {type(variant).__name__ for variant in variants.values() if not isinstance(variant, _VARIANTS)}
    if kinds:
        raise NotSupportedError(f"{where} uses {', '.join(sorted(kinds))}, which cannot be sharded yet; {_MERGE}")
    if layer.merged_adapters:
        raise NotSupportedError(
            f"{where} has its adapters {', '.join(layer.merged_adapters)} merged into the base for now: call "
            "unmerge_adapter() before shard(), or merge_and_unload()"
        )
