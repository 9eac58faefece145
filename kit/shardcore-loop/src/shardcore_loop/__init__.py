"""What a training loop of one's own needs beside a sharded model; Trainer and Accelerate bring theirs.

May import the core; of what is around it `shardcore_shardformer` alone imports this.
"""

from __future__ import annotations

from shardcore_loop.data import ShardedDataLoader
from shardcore_loop.meter import StepMeter
from shardcore_loop.optimizers import LocalParts, WholeTensors
from shardcore_loop.preemption import Preemption

__all__ = ["LocalParts", "Preemption", "ShardedDataLoader", "StepMeter", "WholeTensors"]
