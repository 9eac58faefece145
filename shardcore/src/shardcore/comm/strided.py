"""DTensors of which a rank holds several separate runs of rows, and what torch lacks to save and shard them.

A weight ``[q|k|v]`` split over tensor-parallel ranks leaves ``[q_r|k_r|v_r]`` on rank r. torch can describe that:
``_StridedShard(0, split_factor=3)``. Its optimizers, `clip_grad_norm_` and (since 2.12) `full_tensor` handle it, but
the rest takes one contiguous box for each rank as given. In 2.12 to 2.15:

* `torch.distributed.checkpoint.save` raises "overlapping chunks", and `load` fills the wrong rows, silently: the three
  ``__create_write_items__``, ``__create_chunk_list__`` and ``__get_tensor_shard__`` of `DTensor` know one chunk a rank.
* ``set_model_state_dict`` with ``broadcast_from_rank0`` fills the wrong rows, silently: ``_distribute_tensors``
  copies one slice.
* `fully_shard` cuts dim 0 a second time, ``(_StridedShard(0, tp), _StridedShard(0, 3))``, and such a parameter comes
  back from `full_tensor` in the wrong order, silently.

`install` mends the first two and makes the third raise, for the whole process. The replaced functions pass everything
on to torch's own unless a DTensor has such a placement. Why it is done so: ``docs/adr/0001-fused-column-placement.md``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

# The public placements cannot say "every segment is split".
from shardcore._private import FUSED, complaint, missing
from shardcore._torch import DTensorSpec, StridedShard
from shardcore.comm.collectives import chunk_bounds
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.errors import NotSupportedError

__all__ = ["Block", "Runs", "blocks_at", "fsdp_placement", "install", "segment_runs", "segmented", "torch_lacks"]

#: First and one-past-last index of each of several runs of rows.
Runs = tuple[tuple[int, int], ...]

_INSTALLED = "_shardcore_several_blocks"  # on DTensor: the patches are in place


class Block(NamedTuple):
    """A box of the whole tensor that is also a box of one rank's part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    in_local: tuple[slice, ...]

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """The box in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


def segment_runs(size: int, segments: int, ranks: int, rank: int) -> Runs:
    """Return the rows of ``rank`` if each of the equal ``segments`` of ``size`` rows is split over ``ranks``."""
    step = size // segments
    start, stop = chunk_bounds(step, ranks, rank)
    return tuple((at + start, at + stop) for at in range(0, step * segments, step))


def segmented(segments: int, dim: int = 0) -> Placement:
    """Return the DTensor placement of `segment_runs` on ``dim``."""
    return StridedShard(dim, split_factor=segments)


def torch_lacks() -> str | None:
    """Say why this torch cannot hold such DTensors, or return None if it can."""
    gone = missing(FUSED)
    return complaint(gone) if gone else None


def install() -> None:
    """Make torch save, load and distribute DTensors of several runs, and refuse the FSDP2 cut that it gets wrong.

    Process-wide; the first call acts, the others do nothing.

    Raises:
        NotSupportedError: this torch lacks what is needed.
    """
    if hasattr(DTensor, _INSTALLED):
        return
    if lack := torch_lacks():
        raise NotSupportedError(lack)
    setattr(DTensor, _INSTALLED, True)
    _patch_checkpoint()
    _patch_broadcast()
    _patch_fully_shard()


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """Choose the dim on which FSDP2 cuts a parameter: dim 1 for a weight of several runs, else torch's choice.

    Pass it to every `fully_shard` that covers a fused linear, as ``shard_placement_fn``; `shardcore.shard` and the
    booster do. ``in_features`` must be divisible by the size of the mesh then.
    """
    spec = spec_of(parameter)
    return Shard(1) if spec is not None and parameter.ndim > 1 and _strided_dim(spec) == 0 else None


def _strided_dim(spec: DTensorSpec) -> int | None:
    """Return the dim of which a rank holds several runs, or None.

    FSDP2 over a plain split on dim 0 writes ``(_StridedShard(0, tp), Shard(0))``: later placements cut the same dim
    into as many parts as the factor says, which leaves one run. Those are torch's own to handle.
    """
    for at, placement in enumerate(spec.placements):
        if isinstance(placement, StridedShard):
            later = _cuts(spec, placement.dim)
            parts = math.prod(spec.mesh.size(i) for i in later if i > at)
            if placement.split_factor not in (1, parts):
                return int(placement.dim)
    return None


def _cuts(spec: DTensorSpec, dim: int) -> list[int]:
    return [i for i, p in enumerate(spec.placements) if isinstance(p, Shard | StridedShard) and p.dim == dim]


def _blocks(tensor: DTensor) -> list[Block] | None:
    """Return the boxes that this rank holds of a tensor of several runs; None for all others, torch's to handle.

    Raises:
        NotSupportedError: another placement cuts the same dim.
    """
    spec = spec_of(tensor)
    if spec is None or _strided_dim(spec) is None:
        return None
    coordinate = spec.mesh.get_coordinate()
    return [] if coordinate is None else blocks_at(spec, coordinate)


def blocks_at(spec: DTensorSpec, coordinate: Sequence[int]) -> list[Block] | None:
    """Return the boxes that are at ``coordinate`` of a tensor of several runs; None for all other placements.

    Raises:
        NotSupportedError: another placement cuts the same dim.
    """
    if _strided_dim(spec) is None:
        return None
    runs: list[Runs] = [((0, size),) for size in spec.shape]
    for dim, size in enumerate(spec.shape):
        cuts = _cuts(spec, dim)
        if len(cuts) > 1:
            raise NotSupportedError(f"dim {dim} of a DTensor with placements {spec.placements} is cut twice")
        for axis in cuts:
            factor = getattr(spec.placements[axis], "split_factor", 1)
            if size % factor:
                raise NotSupportedError(f"{size} rows in {factor} segments: placements {spec.placements}, dim {dim}")
            runs[dim] = segment_runs(size, factor, spec.mesh.size(axis), coordinate[axis])
    return [_block(box) for box in itertools.product(*map(_with_local_start, runs))]


def _with_local_start(runs: Runs) -> list[tuple[int, int, int]]:
    """Add to the first and one-past-last index of each run that is not empty where it starts in the local tensor."""
    starts = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, stop, at) for (start, stop), at in zip(runs, starts, strict=False) if stop > start]


def _block(box: tuple[tuple[int, int, int], ...]) -> Block:
    return Block(
        offsets=tuple(start for start, _, _ in box),
        sizes=tuple(stop - start for start, stop, _ in box),
        in_local=tuple(slice(at, at + stop - start) for start, stop, at in box),
    )


def _patch_checkpoint() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    cls: Any = DTensor
    write_items, chunk_list, tensor_shard = (
        cls.__create_write_items__,
        cls.__create_chunk_list__,
        cls.__get_tensor_shard__,
    )

    def chunks(blocks: list[Block]) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in blocks]

    @functools.wraps(write_items)
    def create_write_items(self: DTensor, fqn: str, obj: Any) -> Any:
        if (blocks := _blocks(self)) is None:
            return write_items(self, fqn, obj)
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in chunks(blocks)
        ]

    @functools.wraps(chunk_list)
    def create_chunk_list(self: DTensor) -> Any:
        return chunk_list(self) if (blocks := _blocks(self)) is None else chunks(blocks)

    @functools.wraps(tensor_shard)
    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> Any:
        if index.offset is None or (blocks := _blocks(self)) is None:
            return tensor_shard(self, index)
        places = {block.offsets: block.in_local for block in blocks}
        return local_tensor(self).detach()[places[tuple(index.offset)]]

    cls.__create_write_items__ = create_write_items
    cls.__create_chunk_list__ = create_chunk_list
    cls.__get_tensor_shard__ = get_tensor_shard


def _patch_broadcast() -> None:
    from torch.distributed import _state_dict_utils

    module: Any = _state_dict_utils
    distribute = module._distribute_tensors

    @functools.wraps(distribute)
    def distribute_tensors(state: dict[str, Any], keys: list[str], device: Any, pg: Any = None) -> None:
        for key in keys:
            pair = state.get(key)  # the DTensor to fill and the whole tensor, or what needs no distribution
            if isinstance(pair, tuple) and (blocks := _blocks(pair[0])) is not None:
                state[key] = _filled(pair[0], pair[1], blocks, device)
        distribute(state, keys, device, pg)

    module._distribute_tensors = distribute_tensors


def _filled(target: DTensor, whole: Tensor, blocks: list[Block], device: Any) -> DTensor:
    local = local_tensor(target).detach()
    if target.is_meta:
        local = torch.empty_like(local, device=device)
    for block in blocks:
        local[block.in_local] = whole[block.in_whole].to(local)
    if not target.is_meta:
        return target
    stride: Any = target.stride()
    return DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=stride
    )


def _patch_fully_shard() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    cls: Any = FSDPParam
    init = cls._init_sharded_param

    @functools.wraps(init)
    def init_sharded_param(self: Any, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        init(self, param, *args, **kwargs)
        spec = spec_of(param)
        dim = None if spec is None else _strided_dim(spec)
        made = spec_of(self.sharded_param)
        if dim is not None and made is not None and len(_cuts(made, dim)) > 1:
            raise NotSupportedError(
                f"fully_shard would cut the fused tensor-parallel weight {self._module_info.param_name!r} "
                f"{tuple(param.shape)} on dim {dim}, along which each rank already holds several runs; pass "
                "shard_placement_fn=shardcore.nn.fsdp_placement to every fully_shard that covers it"
            )

    cls._init_sharded_param = init_sharded_param
