"""Where the layers of PEFT are in a model, by the paths that their native modules have without them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from shardcore.errors import NotSupportedError

# Layers of PEFT that differ from that for linears in what they merge into: (module, class).
_OF_QUANTIZED = {("bnb", "Linear4bit"), ("bnb", "Linear8bitLt"), ("torchao", "TorchaoLoraLinear")}


@dataclass(slots=True)
class Site:
    """A layer of PEFT in the place of a native module."""

    path: str
    parent: nn.Module
    name: str
    layer: nn.Module


def sites(model: nn.Module, prefix: str = "") -> Iterator[Site]:
    """Yield every layer of PEFT in ``model``, not those inside of others."""
    for name, child in model._modules.items():
        if child is None:
            continue
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield Site(path, model, name, child)
        else:
            yield from sites(child, path)


def inner_name(layer: nn.Module) -> str:
    """Return the name under which a layer of PEFT keeps its native module."""
    return "original_module" if isinstance(layer, AuxiliaryTrainingWrapper) else "base_layer"


def nested(layer: nn.Module) -> list[nn.Module]:
    """Return ``layer`` and those of PEFT inside of it, one for each parameter; the last has the native module."""
    found = [layer]
    while isinstance(inner := found[-1]._modules[inner_name(found[-1])], BaseTunerLayer | AuxiliaryTrainingWrapper):
        found.append(inner)
    return found


def let_be_of_linears(layer: nn.Module) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Let layers of PEFT for linears of bitsandbytes or of torchao be those for linears, which these are then.

    PEFT's two compute the same, and differ in what they merge into. Returns what was changed, with the class it had.
    """
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    for one in nested(layer):
        home = type(one).__module__
        if (home.rpartition(".")[2], type(one).__name__) in _OF_QUANTIZED:
            changed.append((one, type(one)))
            vars(one).setdefault("fan_in_fan_out", False)  # which IA3's layer for linears alone has
            one.__class__ = importlib.import_module(home.rpartition(".")[0] + ".layer").Linear
    return changed


def own_children(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a layer of PEFT, without its native one."""
    return {name: child for name, child in layer.named_children() if name != inner_name(layer)}


def base_of(model: Any) -> nn.Module:
    """Return the model inside of a ``PeftModel``; any other is its own.

    Raises:
        NotSupportedError: it has no such model, or several, or one that is known to PEFT alone.
    """
    if not isinstance(model, PeftModel):
        if isinstance(model, PeftMixedModel | BaseTuner):
            raise NotSupportedError(
                f"a {type(model).__name__} cannot be sharded: give shard() what get_peft_model(model, config) returns "
                "without mixed=True, with adapters of one method"
            )
        return model  # type: ignore[no-any-return]  # a module
    inner: Any = model.base_model
    if isinstance(inner, BaseTuner):
        inner = inner.model
    if not isinstance(inner, nn.Module) or isinstance(inner, PeftModel | BaseTuner):
        raise NotSupportedError(
            f"a {type(model).__name__} around a {type(inner).__name__} cannot be sharded; unload one of the two"
        )
    if type(inner).__module__.partition(".")[0] == "peft":
        methods = ", ".join(sorted(str(getattr(c.peft_type, "value", c.peft_type)) for c in model.peft_config.values()))
        raise NotSupportedError(
            f"adapters of this kind ({methods}, a {type(inner).__name__}) cannot be sharded; use LORA, or train it "
            "unsharded"
        )
    return inner
