"""What the core asks about torchao (see `shardcore.clients`)."""

from __future__ import annotations

from torch import nn
from torchao.utils import TorchAOBaseTensor

from shardcore.errors import NotSupportedError
from shardcore_quantized.unpacking import Unpacking
from shardcore_quantized.weight_torchao import WeightTorchao

__all__ = ["unpacking"]


def unpacking(model: nn.Module) -> Unpacking | None:
    """Return the phase that makes the quantized linears of ``model`` divisible, or None if it has none.

    Raises:
        NotSupportedError: it has something of torchao that cannot be cut.
    """
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, TorchAOBaseTensor):
                continue
            if type(module) is not nn.Linear or name != "weight":
                raise NotSupportedError(
                    f"{path}.{name} of a {type(module).__name__} was quantized by torchao, which is served for the "
                    "weights of torch.nn.Linear alone: leave the module out (modules_to_not_convert of TorchAoConfig)"
                )
            found[path] = (module, WeightTorchao.of(f"{path}.{name}", parameter))
    return Unpacking(model, found) if found else None
