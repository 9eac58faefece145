"""The whole tensors of a sharded model, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.context import nearest_context


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of each entry of ``model.state_dict()``, on every rank.

    For the weights of a step in a process that generates with them (vLLM's ``load_weights`` takes such pairs). A tensor
    is gathered when it is asked for and may be forgotten before the next: no rank ever holds the whole model. Every
    rank of the model has to go through all of them; a tensor with several names is gathered once and yielded by its
    first.

    Args:
        model: a sharded model, one that holds it, or one that is not sharded, whose tensors are its own.

    Yields:
        The name in the unsharded model, and a plain tensor of the whole shape, on the device of the model. What is not
        split is the model's own, detached: copy what is kept beyond the next step.

    Raises:
        NotSupportedError: the model is a pipeline, of which each rank has other blocks.
        ConfigError: the model has no values yet.
    """
    context = nearest_context(model)
    if context is not None and context.sizes.pp > 1:
        raise NotSupportedError(
            f"full_tensors of a {type(model).__name__} with {context.sizes.pp} pipeline stages: each rank has other "
            "blocks. Save it (shardcore.save_checkpoint), and convert that (shardcore convert)"
        )
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    if empty := [name for name, tensor in state.items() if tensor.device.type == "meta"]:
        raise ConfigError(f"{empty[0]} is on the meta device: it has no values. Load the weights first.")
    return _gathered(state)


def _gathered(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    known: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) not in known:
            known.add(id(tensor))
            found: Any = tensor.detach()
            yield name, found.full_tensor() if isinstance(found, DTensor) else found
