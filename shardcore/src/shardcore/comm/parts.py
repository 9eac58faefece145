"""Which part of a DTensor is at which coordinate of its mesh, for every placement that shardcore and FSDP2 make.

A part is a box of the whole tensor, or several: of a weight ``[q|k|v]`` whose segments are split each by itself, a rank
has several runs of rows (see `shardcore.comm.strided`). Whoever saves, loads or sends parts cuts them here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from shardcore._torch import DTensorSpec, StridedShard
from shardcore.comm.collectives import chunk_bounds
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.errors import ConfigError, NotSupportedError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


#: First and one-past-last index of each of several runs of rows.
Runs = tuple[tuple[int, int], ...]


class Block(NamedTuple):
    """A box of the whole tensor that is also a box of one rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    in_local: tuple[slice, ...]

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """The box in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box as `torch.distributed.checkpoint` says it."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def segment_runs(size: int, segments: int, ranks: int, rank: int) -> Runs:
    """Return the rows of ``rank`` if each of the equal ``segments`` of ``size`` rows is split over ``ranks``."""
    step = size // segments
    start, stop = chunk_bounds(step, ranks, rank)
    return tuple((at + start, at + stop) for at in range(0, step * segments, step))


def split_dim(placement: Placement) -> int | None:
    """Return the dim that ``placement`` splits; ``is_shard()`` says no for the strided kind."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def several_runs(spec: DTensorSpec) -> dict[int, int]:
    """Return the dims of which a rank holds several runs, each with the axis that splits it.

    FSDP2 over a plain split on dim 0 writes ``(_StridedShard(0, tp), Shard(0))``: later placements cut the same dim
    into as many parts as the factor says, which leaves one run.
    """
    return _several_runs(spec.mesh.shape, spec.placements)


def _several_runs(sizes: Sequence[int], placements: Sequence[Placement]) -> dict[int, int]:
    found = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            later = [i for i in range(axis + 1, len(placements)) if split_dim(placements[i]) == placement.dim]
            if placement.split_factor not in (1, math.prod(sizes[i] for i in later)):
                found[int(placement.dim)] = axis
    return found


def place_of(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return which part of a tensor of ``shape`` is at ``coordinate`` on a mesh of ``sizes``: its bounds on every dim.

    Axes cut from left to right, except that those of a strided placement (FSDP2 over ``tp``) cut what the axes to their
    right have left. DTensor's own ``__create_chunk_list__`` cuts in another order: 97 rows on 3 x 2 ranks come out
    wrong there in torch 2.13. A rank that holds several runs of rows has no such part, see `blocks_of`.
    """
    place = [(0, size) for size in shape]
    strided = [axis for axis, placement in enumerate(placements) if getattr(placement, "split_factor", 1) > 1]
    for axis in [*(a for a in range(len(placements)) if a not in strided), *reversed(strided)]:
        dim = split_dim(placements[axis])
        if dim is not None:
            start, stop = place[dim]
            left, right = chunk_bounds(stop - start, sizes[axis], coordinate[axis])
            place[dim] = (start + left, start + right)
    return tuple(place)


def runs_of(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Runs]:
    """Return the runs along every dim of a tensor of ``shape`` that are at ``coordinate`` on a mesh of ``sizes``.

    Some may be empty. It raises if the placements cut one dim in a way that is not known.
    """
    runs: list[Runs] = [(span,) for span in place_of(shape, sizes, placements, coordinate)]
    for dim, axis in _several_runs(sizes, placements).items():
        size, segments = shape[dim], placements[axis].split_factor  # type: ignore[attr-defined]  # strided
        if sum(split_dim(placement) == dim for placement in placements) > 1:
            raise NotSupportedError(f"dim {dim} of a DTensor with placements {placements} is cut twice")
        if size % segments:
            raise NotSupportedError(f"{size} rows in {segments} segments: placements {placements}, dim {dim}")
        runs[dim] = segment_runs(size, segments, sizes[axis], coordinate[axis])
    return runs


def _runs(spec: DTensorSpec, coordinate: Sequence[int]) -> list[Runs]:
    return runs_of(spec.shape, spec.mesh.shape, spec.placements, coordinate)


def extent(runs: Sequence[Runs]) -> tuple[int, ...]:
    """Return the shape of a part that has these runs along its dims."""
    return tuple(sum(stop - start for start, stop in own) for own in runs)


def cut(full: Tensor, runs: Sequence[Runs]) -> Tensor:
    """Return the part of ``full`` with these runs along its dims: a view of it if there is one run of each."""
    for dim, own in enumerate(runs):
        if own != ((0, full.size(dim)),):
            parts = [full.narrow(dim, start, stop - start) for start, stop in own]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return full


def blocks_of(spec: DTensorSpec, coordinate: Sequence[int]) -> list[Block]:
    """Return the boxes of a tensor that are at ``coordinate``, none of them empty."""
    return _boxes(_runs(spec, coordinate))


def own_blocks(tensor: Tensor) -> list[Block]:
    """Return the boxes of ``tensor`` that are here: of a plain one all of it."""
    if not isinstance(tensor, DTensor):
        return _boxes([((0, size),) for size in tensor.shape])
    coordinate = tensor.device_mesh.get_coordinate()
    return [] if coordinate is None else blocks_of(spec_of(tensor), coordinate)


def _boxes(runs: Sequence[Runs]) -> list[Block]:
    blocks = []
    for box in itertools.product(*map(_with_local_start, runs)):
        sizes = tuple(stop - start for start, stop, _ in box)
        in_local = tuple(slice(at, at + size) for (*_, at), size in zip(box, sizes, strict=True))
        blocks.append(Block(tuple(start for start, *_ in box), sizes, in_local))
    return blocks


def _with_local_start(runs: Runs) -> list[tuple[int, int, int]]:
    """Add to the first and one-past-last index of each run that is not empty where it starts in the local tensor."""
    starts = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, stop, at) for (start, stop), at in zip(runs, starts, strict=False) if stop > start]


def copies_of(tensor: DTensor, home: Sequence[int]) -> Iterator[tuple[int, Block]]:
    """Yield (global rank, box) for boxes that make up ``tensor``, in the same order on all ranks.

    Of the copies of a box that one is taken which has the coordinate ``home`` on every axis that replicates.
    """
    spec = spec_of(tensor)
    ranks = spec.mesh.mesh
    split = [split_dim(placement) is not None for placement in spec.placements]
    ways = [range(n) if s else (h,) for n, s, h in zip(ranks.shape, split, home, strict=True)]
    for coordinate in itertools.product(*ways):
        for block in blocks_of(spec, coordinate):
            yield int(ranks[coordinate]), block


def check_parts(state: Mapping[str, Any]) -> None:
    """Make sure that this rank holds of every tensor what the others will expect of it; raise if it does not."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type == "meta":
            raise ConfigError(f"{name} is on the meta device: it has no values to save. Load the weights first.")
        if isinstance(tensor, DTensor):
            spec = spec_of(tensor)
            wanted, held = extent(_runs(spec, spec.mesh.get_coordinate() or ())), tuple(local_tensor(tensor).shape)
            if wanted != held or any(p.is_partial() for p in spec.placements):
                raise NotSupportedError(
                    f"{name} lies on the ranks as {spec.placements}, of which this rank should hold a part of shape "
                    f"{wanted} and holds {held}; such a placement cannot be saved"
                )


def part_of(full: Tensor, like: DTensor) -> DTensor:
    """Return the tensor ``full``, which every rank holds, as a DTensor that lies as ``like`` does; nothing is sent."""
    spec = spec_of(like)
    return laid_out(cut(full, _runs(spec, spec.mesh.get_coordinate() or ())), like)


def laid_out(local: Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of a tensor, of any dtype, as a DTensor of the shape of ``like`` that lies as it does."""
    spec = spec_of(like)
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=like.shape, stride=tuple(like.stride())
    )
