"""Optimizers that cannot step DTensors are refused before their step, with the words what to use.

They use operations that DTensor lacks, and fail in the middle of a step with torch's words about placements or "mixed
torch.Tensor and DTensor". `shardcore.optimizers` hands such optimizers plain tensors.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcore.errors import NotSupportedError

__all__ = ["refuse_unable_optimizers", "what_to_use"]

_WHOLE, _PARTS = "WholeTensors", "LocalParts"

#: By library and class: what of `shardcore.optimizers` to use. Rprop treats every element by itself.
_UNABLE = {
    ("torch", "Adafactor"): _WHOLE,
    ("torch", "LBFGS"): _WHOLE,
    ("torch", "Rprop"): _PARTS,
    ("transformers", "Adafactor"): _WHOLE,
    ("timm", "Adafactor"): _WHOLE,
    ("timm", "AdamP"): _WHOLE,
    ("timm", "Kron"): _WHOLE,
    ("timm", "Mars"): _WHOLE,
    ("timm", "NvNovoGrad"): _WHOLE,
}

_HOOK = "_shardcore_refuses"


def what_to_use(optimizer: Any) -> str | None:
    """Return why ``optimizer`` cannot step DTensors and what can, or None where nothing is known against it."""
    kind = type(optimizer)
    wanted = _UNABLE.get((kind.__module__.partition(".")[0], kind.__name__))
    # timm: an update is taken where most of a whole tensor agrees with its gradient.
    if wanted is None and kind.__module__.startswith("timm.") and _is_cautious(optimizer):
        wanted = _WHOLE
    if wanted is None:
        return None
    return (
        f"{kind.__module__}.{kind.__qualname__} uses operations that the parameters of a sharded model lack "
        f"(they are DTensors), and would fail in its first step. Use shardcore.optimizers.{wanted}({kind.__name__}, "
        "model.parameters(), ...), which steps it on plain tensors and gives what it gives the unsharded model; or "
        "another optimizer, such as AdamW"
    )


def refuse_unable_optimizers() -> None:
    """Refuse steps of such optimizers on DTensors, for the whole process; the first call acts."""
    if not hasattr(Optimizer, _HOOK):
        setattr(Optimizer, _HOOK, register_optimizer_step_pre_hook(_refuse))


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    words = what_to_use(optimizer)
    if words and any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise NotSupportedError(words)


def _is_cautious(optimizer: Any) -> bool:
    return any(group.get("caution") for group in optimizer.param_groups)
