"""Quantizing a checkpoint as it is loaded: each rank quantizes its part of a weight as soon as it has read that."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer

from shardcore.clients import client_of
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.plan.shard_plan import ModelPhase
from shardcore.plugins.unserved import installing

_ONLY = "BitsAndBytesConfig(load_in_4bit=True) of transformers is known here"
# Whose quantized weights can be divided, by shardcore-quantized.
_LIBRARIES = ("bitsandbytes", "torchao")
# Where transformers has its own linears for FP8.
_FP8 = "transformers.integrations.finegrained_fp8"


def quantizer_of(config: Any) -> Any:
    """Return what transformers quantizes with for ``quantization_config=config``, None for None.

    Raises:
        ConfigError: it is a way to quantize that is not known here, or something is not installed.
    """
    if config is None:
        return None
    if not getattr(config, "load_in_4bit", False):
        raise ConfigError(
            f"shardcore.from_pretrained: quantization_config is a {type(config).__name__}; {_ONLY}, and no other one"
        )
    if client_of("bitsandbytes") is None:
        raise ConfigError(f"shardcore.from_pretrained: quantization_config needs {_missing('bitsandbytes')}")
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    try:
        quantizer.validate_environment(device_map={"": "cpu"})
    except ImportError as error:
        raise ConfigError(f"shardcore.from_pretrained: quantization_config: {error}") from error
    return quantizer


def refuse_packed_files(config: Any, place: str) -> None:
    """Refuse a checkpoint that a library has quantized: parts of its packed weights are not read.

    Raises:
        ConfigError: it has.
    """
    said = getattr(config, "quantization_config", None)
    method = said.get("quant_method") if isinstance(said, dict) else getattr(said, "quant_method", None)
    if method in _LIBRARIES:
        raise ConfigError(
            f"{place} is quantized by {method} already. Load it by its class of transformers, model = Class."
            f"from_pretrained({place!r}, device_map='cpu'), and give it to shardcore.shard(model, ...)"
        )


def unpacking(model: nn.Module) -> ModelPhase | None:
    """Return what makes linears of transformers in FP8 divisible, or None if ``model`` has none.

    Refuse a model that a library has quantized where its client is not installed, which makes it ready.

    Raises:
        NotSupportedError: it is not.
    """
    for path, held in itertools.chain(model.named_modules(), model.named_parameters()):
        library = type(held).__module__.partition(".")[0]
        if library in _LIBRARIES and client_of(library) is None:
            raise NotSupportedError(f"{path} was quantized by {library}; to shard it takes {_missing(library)}")
    fp8 = next((path for path, module in model.named_modules() if type(module).__module__ == _FP8), None)
    if fp8 is None:
        return None
    if (client := client_of("finegrained_fp8")) is None:
        raise NotSupportedError(f"{fp8} is in FP8; to shard it takes {_missing()}")
    phase: ModelPhase | None = client.unpacking(model)
    return phase


def _missing(library: str = "") -> str:
    name = "shardcore-quantized"
    return f"{name}{library and f'[{library}]'}, which is not installed{installing(f'clients/{name}')}"


def quantize_empty(model: Any, quantizer: Any) -> None:
    """Let transformers put its quantized linears into a model on the meta device, as before it reads weights.

    Raises:
        ConfigError: weights would have to be transposed.
    """
    transposed = [path for path, module in model.named_modules() if isinstance(module, Conv1D)]
    trained = {path: module.training for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        quantizer.preprocess_model(model, device_map=None)
    finally:
        torch.set_default_dtype(before)
    for path in transposed:
        if not isinstance(model.get_submodule(path), Conv1D):
            raise ConfigError(
                f"shardcore.from_pretrained: {path} of this {type(model).__name__} is a Conv1D, whose weight (in, out) "
                "is not quantized as it is read. Load it by transformers' from_pretrained, and give it to shard()"
            )
    for path, mode in trained.items():
        model.get_submodule(path).training = mode
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
