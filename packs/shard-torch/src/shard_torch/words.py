"""The words that policies for torch's transformers are written with, beside those of `shardcore.styles`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shard_torch.encoder import PaddedEncoder
from shardcore.policy import Rule, Scope, Word
from shardcore.styles import attention, norm, replicate, sequence

#: What has rules of its own, wherever it is.
_SERVED = (
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
)


def stack() -> Rule:
    """An encoder or a decoder of torch: its last norm, if it has one, and where its tokens are split and gathered."""

    def plan(scope: Scope) -> None:
        has_norm = scope.module._modules.get("norm") is not None
        if has_norm:
            norm("norm").plan(scope)
        if isinstance(scope.module, nn.TransformerEncoder):
            scope.swap("", PaddedEncoder)
        sequence(scatter="layers[0]", gather="norm" if has_norm else "layers[-1]").plan(scope)

    return Word(text="stack()", planned=plan)


def rest() -> Rule:
    """A model around modules of torch: attention outside of torch's layers is split, all else is on every rank."""

    def plan(scope: Scope) -> None:
        if len([*scope.above()]) == 1:  # a model may hold another one of its class
            _plan_below(scope, scope.module, "")

    return Word(text="rest()", planned=plan)


def _plan_below(scope: Scope, module: nn.Module, path: str) -> None:
    if isinstance(module, nn.MultiheadAttention):
        attention(path).plan(scope)
    if isinstance(module, _SERVED):
        return
    own = [f"{path}.{name}".lstrip(".") for name, p in module._parameters.items() if p is not None]
    if own:
        replicate(*own).plan(scope)
    for name, child in module.named_children():
        _plan_below(scope, child, f"{path}.{name}".lstrip("."))


def mixes_features(layer: nn.Module) -> bool:
    """Tell whether the activation of a layer computes features from others, of which a rank may not have them."""
    activation: Any = layer.activation  # a function or a module
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return not (isinstance(activation, nn.PReLU) and activation.num_parameters == 1)
    x = torch.linspace(-3, 3, 8, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        whole, part = (activation(values.clone()) for values in (x[None], x[None, :3]))
    return whole.shape != (1, 8) or part.shape != (1, 3) or not torch.allclose(whole[:, :3], part)
