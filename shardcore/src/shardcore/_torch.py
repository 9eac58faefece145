"""Private names of torch that the core imports, and the facts about its releases that the core acts upon.

Whatever has no public path comes from here, under a name without an underscore; `shardcore._private` says what each is
for. What only some features need is imported where it is used, after `shardcore._private.require`.
"""

from __future__ import annotations

from shardcore._private import (
    ALL_GATHER,
    CLIPPED_SUMS,
    CORE,
    REDUCE_SCATTER,
    SET_TIMEOUT,
    STAGES,
    TRACED_READS,
    require,
)

try:
    import torch.distributed._functional_collectives as funcol
    from torch._C import _are_functorch_transforms_active as in_transform
    from torch._C import _current_graph_task_id as backward_task
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:
    require(CORE)
    raise

__all__ = [
    "CAN_PIPELINE",
    "CAN_TRACE",
    "SCALES_PARTIAL",
    "DTensorSpec",
    "FakeTensor",
    "StridedShard",
    "all_gather_single",
    "backward_task",
    "funcol",
    "in_transform",
    "reduce_scatter_single",
    "set_timeout",
]

require(CORE)  # attributes too, which no import misses

#: Whether reads of parameters may be compiled.
CAN_TRACE = TRACED_READS.is_there()

#: Whether stages of torch's pipelines may be given what gets no gradient.
CAN_PIPELINE = STAGES.is_there()

#: Whether torch multiplies partial gradients rightly, as it does to clip them.
SCALES_PARTIAL = CLIPPED_SUMS.is_there()

all_gather_single = ALL_GATHER.find()
reduce_scatter_single = REDUCE_SCATTER.find()
set_timeout = SET_TIMEOUT.find()
