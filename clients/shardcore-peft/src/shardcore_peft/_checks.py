"""Which methods and layers of PEFT have a sharded form, and what is said of the others before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from peft import PeftType, PromptEncoderReparameterizationType
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.layer import Conv1d, Conv2d, Embedding, Linear, ParamWrapper
from peft.tuners.lora.variants import (
    DoraConv1dVariant,
    DoraConv2dVariant,
    DoraEmbeddingVariant,
    DoraLinearVariant,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.nn import ColumnLinear, Replicated, RowLinear, VocabEmbedding

_MERGE = "merge the adapter before shard() (merge_and_unload() in PEFT), or train it unsharded"

#: Why rows of a table that PEFT trains by themselves cannot be sharded.
TOKENS = (
    "rows of a table that are trained by themselves have no sharded form. Leave it out: LoRA of the embedding "
    "(target_modules), or a copy of it (modules_to_save), can be sharded"
)

PARAMETERS = (
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

#: Settings that make other variants of LoRA, in one release or another; newer ones say of themselves that they do.
_OTHER_VARIANTS = ("alora_invocation_tokens", "arrow_config", "use_bdlora", "use_qalora")

#: How LoRA begins without a look at the weights of the base.
_BLIND = (True, False, "gaussian", "orthogonal")
#: How it begins with values that come later: without those of a file, from activations of the model.
_LATER = ("eva",)


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
    if replicas > 1 and getattr(config, "layer_replication", None):
        raise NotSupportedError(
            f"the adapter {name!r} has layer_replication={config.layer_replication}, by which several layers have the "
            "same weights: FSDP2 takes them for those of one layer. Leave it out, or use tensor parallelism alone"
        )
    if ranks * replicas > 1 and getattr(config, "target_modules_to_tie", None):
        raise NotSupportedError(_tied(name))


def trains_beside(config: Any) -> str:
    """Return what prompts train of the model beside themselves, by its names or the task; "" if that is nothing."""
    if not config.is_prompt_learning:
        return ""
    task = config.task_type if config.task_type in _CLASSIFIES else ""
    # PEFT adds the names of a task to those that a file has already.
    return ", ".join(sorted(set(getattr(config, "modules_to_save", None) or ()))) or task


def check_new(config: Any, name: str, *, several: bool, loaded: bool) -> None:
    """Refuse settings of an adapter that can come before `shard` alone.

    Most make it of the values of the base, which no rank has.

    Args:
        config: the settings of the adapter.
        name: of the adapter.
        several: whether the model has several ranks.
        loaded: its values come from a file.

    Raises:
        NotSupportedError: there are some.
    """
    before = "attach it before shard(), as shard(get_peft_model(model, config))"
    if several and (trained := trains_beside(config)):
        raise NotSupportedError(
            f"the adapter {name!r} has prompts, and trains a copy of a part of the model ({trained}): {before}"
        )
    way = getattr(config, "init_lora_weights", True)
    if way not in _BLIND and not (loaded and way in _LATER):
        raise NotSupportedError(
            f"the adapter {name!r} begins with what init_lora_weights={way!r} computes of whole weights, of which each "
            f"rank has a part: {before}"
        )
    if not several:
        return
    if getattr(config, "trainable_token_indices", None) is not None:
        raise NotSupportedError(f"the adapter {name!r} has trainable_token_indices; {TOKENS}")
    if getattr(config, "layer_replication", None):
        raise NotSupportedError(
            f"the adapter {name!r} has layer_replication={config.layer_replication}, which copies layers of a model "
            f"that is sharded already: {before}"
        )
    if variants := _variants_of(config):
        raise NotSupportedError(f"the adapter {name!r} has {variants}, which cannot be sharded yet; {_MERGE}")
    if config.peft_type not in (*_OUTSIDE, *_INSIDE):
        method = getattr(config.peft_type, "value", config.peft_type)
        raise NotSupportedError(f"the adapter {name!r} is {method}, which may begin with values of the base: {before}")


def _variants_of(config: Any) -> str:
    """Return the settings by which LoRA is one of its variants, other than DoRA."""
    fields = dataclasses.fields(config)
    names = {*_OTHER_VARIANTS, *(field.name for field in fields if field.metadata.get("is_lora_variant"))}
    return ", ".join(sorted(name for name in names - {"use_dora"} if getattr(config, name, None)))


def _tied(name: str) -> str:
    return (
        f"the adapter {name!r} has ensure_weight_tying=True with LoRA of tied modules: their matrices share memory, "
        "which those of a sharded model cannot. Name the embedding in modules_to_save, where copies stay tied, or "
        "leave ensure_weight_tying out"
    )


def check_tied_targets(model: nn.Module, config: Any, name: str, targets: Collection[str]) -> None:
    """Refuse adapters of tied modules that PEFT is told to tie.

    Args:
        model: the model.
        config: the settings of the adapter.
        name: of the adapter.
        targets: the paths of the modules that get adapters.

    Raises:
        NotSupportedError: there are some.
    """
    saved = getattr(config, "modules_to_save", None) or ()
    copied = any(module.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for module in saved)
    if not getattr(config, "ensure_weight_tying", False) or copied:
        return
    tables = [
        find() for way in ("get_input_embeddings", "get_output_embeddings") if (find := getattr(model, way, None))
    ]
    weights = [getattr(table, "weight", None) for table in tables]
    if len(weights) == 2 and weights[0] is weights[1] and any(model.get_submodule(t) in tables for t in targets):
        raise NotSupportedError(_tied(name))


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


def check_layer(layer: nn.Module, where: str) -> None:
    """Refuse a layer that has no sharded form, whatever its base will be.

    Raises:
        NotSupportedError: it has none.
    """
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if isinstance(layer, ParamWrapper):
        raise NotSupportedError(f"{where} has an adapter of its parameter {layer.parameter_name}; {PARAMETERS}")
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
