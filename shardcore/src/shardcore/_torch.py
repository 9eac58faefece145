"""Private names of torch that the core imports, and the facts about its releases that the core acts upon.

Whatever has no public path comes from here, under a name without an underscore; `shardcore._private` says what each is
for. What only some features need is imported where it is used, after `shardcore._private.require`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardcore._private import CORE, require

try:
    import torch.distributed._functional_collectives as funcol
    from torch._C import _current_graph_task_id as backward_task
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:
    require(CORE)
    raise

__all__ = [
    "CAN_TRACE",
    "SCALES_PARTIAL",
    "DTensorSpec",
    "FakeTensor",
    "StridedShard",
    "all_gather_single",
    "backward_task",
    "funcol",
    "reduce_scatter_single",
]

require(CORE)  # attributes too, which no import misses

_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

#: Whether reads of parameters may be compiled. Traced by torch 2.11, `to_local` of a split parameter has a gradient
#: that calls itself replicated.
CAN_TRACE = _RELEASE >= (2, 13)

#: Whether torch multiplies partial gradients rightly, as it does to clip them. 2.11 multiplies several of them at once
#: (``_foreach_mul_``) by a part of the factor, so that they are hardly clipped.
SCALES_PARTIAL = _RELEASE >= (2, 13)

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
