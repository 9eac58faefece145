"""Which box of which tensor each rank writes and reads, in the terms of `torch.distributed.checkpoint` (DCP).

Everything follows from names, shapes and placements, so that every rank knows the boxes of all others and nothing is
sent to plan a save. Several runs of rows on one rank, which DCP has no words for, are several boxes; of a tensor that
ranks hold alike one of them writes each box. DCP's own planner cuts 97 rows on 3 x 2 ranks wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from shardcore._progress import Progress
from shardcore.agree.fingerprint import checksum
from shardcore.comm.dtensor_params import local_tensor
from shardcore.comm.parts import Block, copies_of, own_blocks
from shardcore.errors import CheckpointError

#: A box in a part that was saved.
Box: TypeAlias = tuple[slice, ...]


def _writes(tensors: Mapping[str, Tensor], first: int) -> Iterator[tuple[str, int, Block]]:
    """Yield all boxes of all tensors, each with its name and the rank that writes it, in the same order on every rank.

    A tensor whose mesh lacks ``first``, the first rank of the model, has copies of all its boxes on one that has it,
    and yields none. What several ranks hold alike they write in turn.
    """
    for turn, (key, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            yield from ((key, first, block) for block in own_blocks(tensor))
        elif bool((tensor.device_mesh.mesh == first).any()):
            home = [turn % n for n in tensor.device_mesh.mesh.shape]
            yield from ((key, owner, block) for owner, block in copies_of(tensor, home))


def own_parts(tensors: Mapping[str, Tensor], first: int, rank: int) -> dict[MetadataIndex, Tensor]:
    """Return what ``rank``, this one, writes: views of its tensors by what DCP calls them."""
    return {
        MetadataIndex(key, block.offsets): local_tensor(tensors[key]).detach()[block.in_local]
        for key, owner, block in _writes(tensors, first)
        if owner == rank
    }


def entries_of(tensors: Mapping[str, Tensor], first: int) -> dict[str, TensorStorageMetadata]:
    """Return what DCP has to know of each of ``tensors``, of which the parts have to be the whole."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    for key, _, block in _writes(tensors, first):
        chunks[key].append(block.chunk)
    for key, tensor in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in chunks[key]) != tensor.numel():
            raise CheckpointError(
                f"{key} {tuple(tensor.shape)} lies on ranks of which {first}, the first of the model, is none: "
                "its mesh is no part of the model's. Nothing was written."
            )
    return {
        key: TensorStorageMetadata(TensorProperties(dtype=t.dtype), t.size(), chunks[key]) for key, t in tensors.items()
    }


class _Planner(DefaultSavePlanner):
    """Hands the parts of this rank to DCP's writer, and keeps the checksums of those that were handed out."""

    def __init__(self, parts: Mapping[MetadataIndex, Tensor], progress: Progress) -> None:
        super().__init__()
        self._parts, self._progress = parts, progress
        self.checksums: dict[MetadataIndex, str] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of a part."""
        tensor = self._parts[write_item.index]
        self.checksums[write_item.index] = checksum(tensor)
        self._progress.advance(tensor.nbytes)
        return tensor


class Writer(FileSystemWriter):
    """DCP's writer, with the final name in the index instead of the folder that it writes to."""

    def __init__(self, staging: Path, final: Path) -> None:
        super().__init__(str(staging))
        self._final = final

    def storage_meta(self) -> StorageMeta:
        """Say of which checkpoint the files are."""
        return StorageMeta(checkpoint_id=self._final.name, save_id=self.save_id)

    def write(
        self, parts: Mapping[MetadataIndex, Tensor], sizes: Mapping[str, torch.Size], position: int, *, shown: bool
    ) -> list[tuple[WriteResult, str]]:
        """Write the ``parts`` of this rank, or copies of them, and return what was written, each with its checksum.

        ``sizes`` are those of the whole tensors; the ``position`` of this rank names its file.
        """
        if not parts:
            return []
        items = []
        for index, part in parts.items():
            chunk = ChunkStorageMetadata(torch.Size(index.offset or ()), part.size())
            data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), sizes[index.fqn])
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        total = sum(part.nbytes for part in parts.values())
        with Progress(total, f"saving {self._final.name}", shown=shown) as progress:
            planner = _Planner(parts, progress)
            self.set_up_storage_writer(position == 0)
            plan = self.prepare_global_plan([*[SavePlan([])] * position, SavePlan(items)])[position]
            results = self.write_data(plan, planner).wait()
        return [(result, planner.checksums[result.index]) for result in results]


def reads(targets: Mapping[str, Tensor], metadata: Metadata) -> dict[MetadataIndex, list[tuple[Tensor, Box]]]:
    """Return which parts this rank reads to fill ``targets``, of the shapes and dtypes that were saved.

    Each has the boxes that are taken of it, with the memory of this rank, of the shape of the box, that they go to.
    """
    taken: dict[MetadataIndex, list[tuple[Tensor, Box]]] = {}
    for key, target in targets.items():
        saved: Any = metadata.state_dict_metadata[key]
        blocks = {block.offsets: block for block in own_blocks(target)}
        wanted = [block.chunk for block in blocks.values()]
        found = create_read_items_for_chunk_list(key, saved, wanted)
        if sum(math.prod(item.lengths) for item in found) != sum(math.prod(chunk.sizes) for chunk in wanted):
            raise CheckpointError(f"the checkpoint lacks a part of {key} {tuple(target.shape)}; its index is damaged")
        for item in found:
            own = local_tensor(target).detach()[blocks[tuple(item.dest_index.offset or ())].in_local]
            one = own[_box(item.dest_offsets, item.lengths)], _box(item.storage_offsets, item.lengths)
            taken.setdefault(item.storage_index, []).append(one)
    return taken


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
