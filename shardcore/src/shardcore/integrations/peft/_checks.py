"""Which methods and layers of PEFT have a sharded form, and what is said of the others before anything is changed."""

from __future__ import annotations

from typing import Any

from peft import PeftType
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.layer import Conv1d, Conv2d, Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from shardcore.errors import NotSupportedError

__all__ = ["check_layer", "check_method", "check_new"]

_MERGE = "merge the adapter before shard() (merge_and_unload() in PEFT), or train it unsharded"

#: Methods whose parameters are outside of the model, which sees what they make as its input.
_OUTSIDE = (PeftType.PROMPT_TUNING, PeftType.P_TUNING)
_INSIDE = (PeftType.LORA, PeftType.IA3)

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
    if config.is_prompt_learning and replicas > 1:
        raise NotSupportedError(
            f"the adapter {name!r} is {method}, whose parameters are outside of the model that shard() divides: nobody "
            f"would average their gradients over the {replicas} data-parallel replicas. Use dp=1, or LoRA"
        )
    if config.peft_type == PeftType.PREFIX_TUNING and ranks > 1:
        raise NotSupportedError(
            f"the adapter {name!r} is {method}: it gives the model keys and values of all heads, where each rank has "
            "its own. Use PROMPT_TUNING, P_TUNING or LORA"
        )
    if ranks > 1 and config.peft_type not in (*_OUTSIDE, *_INSIDE):
        known = ", ".join(str(kind.value) for kind in (*_INSIDE, *_OUTSIDE))
        raise NotSupportedError(f"the adapter {name!r} is {method}, and these can be sharded: {known}; {_MERGE}")


def check_new(config: Any, name: str) -> None:
    """Refuse settings that make an adapter of the values of the base, which no rank has.

    Raises:
        NotSupportedError: they do.
    """
    way = getattr(config, "init_lora_weights", True)
    looks = None if way in _BLIND else f"init_lora_weights={way!r}"
    if getattr(config, "use_dora", False):
        looks = "DoRA"
    if looks:
        raise NotSupportedError(
            f"the adapter {name!r} begins with what {looks} computes of whole weights, of which each rank has a part: "
            "attach it before shard(), as shard(get_peft_model(model, config))"
        )


def check_layer(layer: nn.Module, where: str) -> None:
    """Refuse a layer that has no sharded form, whatever its base will be.

    Raises:
        NotSupportedError: it has none.
    """
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
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
    if not isinstance(layer, IA3Linear) and layer.lora_variant:
        kinds = sorted({type(variant).__name__ for variant in layer.lora_variant.values()})
        raise NotSupportedError(f"{where} uses {', '.join(kinds)}, which cannot be sharded yet; {_MERGE}")
    if layer.merged_adapters:
        raise NotSupportedError(
            f"{where} has its adapters {', '.join(layer.merged_adapters)} merged into the base for now: call "
            "unmerge_adapter() before shard(), or merge_and_unload()"
        )
