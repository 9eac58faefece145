"""Which box of which tensor each rank writes and reads, in the terms of `torch.distributed.checkpoint` (DCP).

Everything follows from names, shapes and placements, so that every rank knows the boxes of all others and nothing is
sent to plan a save. Several runs of rows on one rank, which DCP has no words for, are several boxes; of a tensor that
ranks hold alike one of them writes each box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from shardcore._progress import Progress
from shardcore.agree.fingerprint import checksum
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.comm.parts import Block, blocks_of, split_dim
from shardcore.errors import CheckpointError

__all__ = ["Part", "Taken", "Writing", "entries_of", "own_parts", "reads", "writes"]


class Part(NamedTuple):
    """A box of a tensor that one rank writes."""

    key: str
    owner: int  # global rank
    block: Block

    @property
    def entry(self) -> MetadataIndex:
        """What DCP calls it."""
        return MetadataIndex(self.key, self.block.offsets)


def writes(tensors: Mapping[str, Tensor], first: int) -> Iterator[Part]:
    """Yield all parts of all tensors, in the same order on every rank.

    A tensor whose mesh lacks the rank ``first`` has copies of all its parts on one that has it, and yields none. What
    several ranks hold alike they write in turn.

    Args:
        tensors: this rank's part of each, by name.
        first: the first rank of the model.
    """
    for turn, (key, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            yield from (Part(key, first, block) for block in _blocks(tensor))
            continue
        spec = spec_of(tensor)
        ranks = spec.mesh.mesh
        if not bool((ranks == first).any()):
            continue
        splits = [split_dim(placement) is not None for placement in spec.placements]
        ways = [range(n) if split else (turn % n,) for n, split in zip(ranks.shape, splits, strict=True)]
        for coordinate in itertools.product(*ways):
            for block in blocks_of(spec, coordinate):
                yield Part(key, int(ranks[coordinate]), block)


def _blocks(tensor: Tensor) -> list[Block]:
    """Return the boxes of ``tensor`` that are here."""
    if isinstance(tensor, DTensor):
        spec = spec_of(tensor)
        coordinate = spec.mesh.get_coordinate()
        return [] if coordinate is None else blocks_of(spec, coordinate)
    shape = tuple(tensor.shape)
    return [Block((0,) * len(shape), shape, tuple(slice(0, size) for size in shape))] if tensor.numel() else []


def own_parts(tensors: Mapping[str, Tensor], first: int, rank: int) -> dict[MetadataIndex, Tensor]:
    """Return what ``rank``, this one, writes: views of its tensors by what DCP calls them."""
    return {
        part.entry: local_tensor(tensors[part.key]).detach()[part.block.in_local]
        for part in writes(tensors, first)
        if part.owner == rank
    }


def entries_of(tensors: Mapping[str, Tensor], first: int) -> dict[str, TensorStorageMetadata]:
    """Return what DCP has to know of each of ``tensors``.

    Raises:
        CheckpointError: the parts of a tensor are not the whole tensor.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    for part in writes(tensors, first):
        chunks[part.key].append(ChunkStorageMetadata(torch.Size(part.block.offsets), torch.Size(part.block.sizes)))
    for key, tensor in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in chunks[key]) != tensor.numel():
            raise CheckpointError(
                f"{key} {tuple(tensor.shape)} lies on ranks of which {first}, the first of the model, is none: "
                "its mesh is no part of the model's. Nothing was written."
            )
    return {
        key: TensorStorageMetadata(TensorProperties(dtype=t.dtype), t.size(), chunks[key]) for key, t in tensors.items()
    }


class Writing(DefaultSavePlanner):
    """Hands the parts of this rank to a storage writer.

    Args:
        parts: of this rank, as `own_parts` returns them, or copies of them.
        sizes: of the whole tensors, by name.
        progress: is told of every part.

    Attributes:
        checksums: of the parts that were handed out.
    """

    def __init__(
        self, parts: Mapping[MetadataIndex, Tensor], sizes: Mapping[str, torch.Size], progress: Progress
    ) -> None:
        super().__init__()
        self._parts, self._sizes, self._progress = parts, sizes, progress
        self.checksums: dict[MetadataIndex, str] = {}

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        return SavePlan([self._item(index, tensor) for index, tensor in self._parts.items()])

    def _item(self, index: MetadataIndex, tensor: Tensor) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(index.offset or ()), tensor.size())
        data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), self._sizes[index.fqn])
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of a part."""
        tensor = self._parts[write_item.index]
        self.checksums[write_item.index] = checksum(tensor)
        self._progress.advance(tensor.nbytes)
        return tensor


class Taken(NamedTuple):
    """What this rank takes of a part that was saved.

    Attributes:
        target: where it goes: memory of this rank, of the shape of what is taken.
        box: what is taken.
    """

    target: Tensor
    box: tuple[slice, ...]


def reads(targets: Mapping[str, Tensor], metadata: Metadata) -> dict[MetadataIndex, list[Taken]]:
    """Return what this rank takes, and of which parts, to fill ``targets``, of the shapes and dtypes that were saved.

    Raises:
        CheckpointError: the checkpoint lacks a part of a tensor.
    """
    taken: dict[MetadataIndex, list[Taken]] = {}
    for key, target in targets.items():
        saved: Any = metadata.state_dict_metadata[key]
        blocks = {block.offsets: block for block in _blocks(target)}
        wanted = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in blocks.values()]
        found = create_read_items_for_chunk_list(key, saved, wanted)
        if sum(math.prod(item.lengths) for item in found) != sum(math.prod(chunk.sizes) for chunk in wanted):
            raise CheckpointError(f"the checkpoint lacks a part of {key} {tuple(target.shape)}; its index is damaged")
        for item in found:
            block = local_tensor(target).detach()[blocks[tuple(item.dest_index.offset or ())].in_local]
            one = Taken(block[_box(item.dest_offsets, item.lengths)], _box(item.storage_offsets, item.lengths))
            taken.setdefault(item.storage_index, []).append(one)
    return taken


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
