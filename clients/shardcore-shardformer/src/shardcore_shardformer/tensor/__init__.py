"""ColoTensor and what goes with it, over torch's DTensor, for those who know ColossalAI 0.1.9.

A `ColoTensor` is a torch tensor that holds this rank's part and knows how the whole is divided: `ProcessGroup` says
among whom, `ShardSpec` or `ReplicaSpec` how, `ComputeSpec` what a layer makes of it. Every operation is DTensor's.
"""

from __future__ import annotations

from shardcore_shardformer.tensor.colo import ColoParameter, ColoTensor
from shardcore_shardformer.tensor.specs import (
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from shardcore_shardformer.tensor.starting import free_port, launch, print_rank_0

__all__ = [
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "ComputePattern",
    "ComputeSpec",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
    "free_port",
    "launch",
    "print_rank_0",
]
