"""How the ranks of a model bring its tensors to one of them, the *writer*, or all to all, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.comm.parts import Block, copies_of
from shardcore.comm.raw import as_bytes
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import device_type_of
from shardcore.mesh.context import nearest_context


class Transport:
    """Brings tensors to the writer, part by part.

    Args:
        tensors: this rank's part of every tensor by name; what is not a DTensor is taken from the writer.
        writer: the global rank that gathers.
        files: the names that will be gathered at a time, if what is gathered may use the same memory each time.
    """

    def __init__(self, tensors: Mapping[str, Any], writer: int, files: Sequence[Sequence[str]] = ()) -> None:
        self.tensors = tensors
        self.writer = writer
        self.files = files
        self.memory: Tensor | None = None
        self.device = torch.device(device_type_of())

    def send(self, names: Iterable[str]) -> None:
        """On the other ranks: send this rank's parts of the tensors ``names``."""
        for tensor in self._distinct(names).values():
            if isinstance(tensor, DTensor):
                for owner, block in _parts(tensor, self.writer):
                    if owner == dist.get_rank():
                        part = tensor.to_local().detach()[block.in_local]
                        dist.send(as_bytes(part.to(self.device).contiguous()), self.writer)

    def gather(self, names: Iterable[str], ready: Callable[[], None]) -> dict[str, Any]:
        """On the writer: return the whole tensors ``names``, on the CPU.

        One tensor under two names arrives once. ``ready`` is called when there is room for all, before any is awaited.
        """
        names = list(names)
        sources = self._distinct(names)
        memory = self._memory()
        whole = {key: self._room(source, memory) for key, source in sources.items()}
        ready()
        for key, source in sources.items():
            if self._is_awaited(source):
                self._fill(whole[key], source)
        return {name: whole[id(self.tensors[name])] for name in names}

    def _distinct(self, names: Iterable[str]) -> dict[int, Any]:
        return {id(self.tensors[name]): self.tensors[name] for name in names}

    def _is_awaited(self, tensor: Any) -> bool:
        """Tell whether the writer lacks a part of ``tensor``."""
        return isinstance(tensor, DTensor) and {o for o, _ in _parts(tensor, self.writer)} != {self.writer}

    def _memory(self) -> _Memory | None:
        if self.memory is None and self.files:
            sizes = [sum(_padded(t) for t in self._distinct(f).values() if self._is_awaited(t)) for f in self.files]
            self.memory = torch.empty(max(sizes), dtype=torch.uint8)
        return None if self.memory is None else _Memory(self.memory)

    def _room(self, tensor: Any, memory: _Memory | None) -> Any:
        """Return the tensor itself where this rank holds all of it, else room for it."""
        if self._is_awaited(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype) if memory is None else memory.take(tensor)
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return tensor.detach().cpu().contiguous() if isinstance(tensor, Tensor) else tensor

    def _fill(self, whole: Tensor, tensor: DTensor) -> None:
        for owner, block in _parts(tensor, self.writer):
            part = whole[block.in_whole]
            if owner == self.writer:
                part.copy_(tensor.to_local().detach()[block.in_local])
                continue
            direct = part.is_contiguous() and self.device.type == "cpu"
            buffer = part if direct else torch.empty(part.shape, dtype=part.dtype, device=self.device)
            dist.recv(as_bytes(buffer), owner)
            if not direct:
                part.copy_(buffer)


@dataclass(slots=True)
class _Memory:
    """Memory for the tensors of one file, used again for the next one: allocators would keep more than a file."""

    free: Tensor

    def take(self, tensor: Tensor) -> Tensor:
        """Return room for a tensor like ``tensor``."""
        taken, self.free = self.free[: _padded(tensor)], self.free[_padded(tensor) :]
        return taken[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64  # bytes, so that every tensor starts where its dtype may


def _parts(tensor: DTensor, writer: int) -> Iterator[tuple[int, Block]]:
    """Yield (owner, box) for the parts that make up ``tensor``, in the same order on all ranks.

    Of the copies of a part, the one that is nearest the writer is taken: on its own coordinate of every axis that
    replicates. Nothing is yielded on a mesh that the writer is not on.
    """
    for home in (tensor.device_mesh.mesh == writer).nonzero().tolist():
        yield from copies_of(tensor, home)


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
