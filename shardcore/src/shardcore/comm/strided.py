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
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

# The public placements cannot say "every segment is split".
from shardcore._private import FUSED, complaint, missing, require
from shardcore._torch import StridedShard
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.comm.parts import Block, Runs, laid_out, own_blocks, part_of, segment_runs, several_runs, split_dim
from shardcore.errors import NotSupportedError

__all__ = ["Runs", "fsdp_placement", "install", "segment_runs", "segmented", "torch_lacks"]

_INSTALLED = "_shardcore_several_blocks"  # on DTensor: the patches are in place


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
    """
    if hasattr(DTensor, _INSTALLED):
        return
    require(FUSED)
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
    return Shard(1) if spec is not None and parameter.ndim > 1 and 0 in several_runs(spec) else None


def _blocks(tensor: DTensor) -> list[Block] | None:
    """Return the boxes that this rank holds of a tensor of several runs; None for all others, torch's to handle."""
    spec = spec_of(tensor)
    return own_blocks(tensor) if spec is not None and several_runs(spec) else None


def _patch_checkpoint() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    def write_items(self: DTensor, blocks: list[Block], fqn: str, obj: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        return [
            WriteItem(
                MetadataIndex(fqn, block.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(block.chunk, properties, self.size()),
            )
            for block in blocks
        ]

    def tensor_shard(self: DTensor, blocks: list[Block], index: MetadataIndex) -> Tensor:
        places = {block.offsets: block.in_local for block in blocks}
        return self.to_local() if index.offset is None else local_tensor(self).detach()[places[tuple(index.offset)]]

    _let("__create_write_items__", write_items)
    _let("__create_chunk_list__", lambda _, blocks: [block.chunk for block in blocks])
    _let("__get_tensor_shard__", tensor_shard)


def _let(name: str, own: Callable[..., Any]) -> None:
    """Let a method of DTensors of several runs be ``own``, which is given their boxes too."""
    native = getattr(DTensor, name)

    @functools.wraps(native)
    def method(self: DTensor, *args: Any) -> Any:
        blocks = _blocks(self)
        return native(self, *args) if blocks is None else own(self, blocks, *args)

    setattr(DTensor, name, method)


def _patch_broadcast() -> None:
    from torch.distributed import _state_dict_utils

    module: Any = _state_dict_utils
    distribute = module._distribute_tensors

    @functools.wraps(distribute)
    def distribute_tensors(state: dict[str, Any], keys: list[str], device: Any, pg: Any = None) -> None:
        for key in keys:
            pair = state.get(key)  # the DTensor to fill and the whole tensor, or what needs no distribution
            if isinstance(pair, tuple) and _blocks(pair[0]) is not None:
                target, whole = pair
                part = local_tensor(part_of(whole, target))
                if target.is_meta:
                    target = laid_out(part.to(device, target.dtype, copy=True), target)
                else:
                    local_tensor(target).detach().copy_(part)
                state[key] = target
        distribute(state, keys, device, pg)

    module._distribute_tensors = distribute_tensors


def _patch_fully_shard() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    cls: Any = FSDPParam
    init = cls._init_sharded_param

    @functools.wraps(init)
    def init_sharded_param(self: Any, param: nn.Parameter, *args: Any, **kwargs: Any) -> None:
        init(self, param, *args, **kwargs)
        spec, made = spec_of(param), spec_of(self.sharded_param)
        if spec is None or made is None:
            return
        cut = [split_dim(placement) for placement in made.placements]
        if twice := [dim for dim in several_runs(spec) if cut.count(dim) > 1]:
            raise NotSupportedError(
                f"fully_shard would cut the fused tensor-parallel weight {self._module_info.param_name!r} "
                f"{tuple(param.shape)} on dim {twice[0]}, along which each rank already holds several runs; pass "
                "shard_placement_fn=shardcore.nn.fsdp_placement to every fully_shard that covers it"
            )

    cls._init_sharded_param = init_sharded_param
