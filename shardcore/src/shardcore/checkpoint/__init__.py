"""Training checkpoints: saved by every rank, complete or absent, resumed on any mesh.

`save_checkpoint` and `load_checkpoint` are for trainings, `Checkpoint` is for whoever looks at one: no process group.
"""

from __future__ import annotations

from shardcore.checkpoint.folders import latest
from shardcore.checkpoint.loading import Loaded, load_checkpoint
from shardcore.checkpoint.reading import Checkpoint
from shardcore.checkpoint.saving import save_checkpoint, wait_for_checkpoint

__all__ = ["Checkpoint", "Loaded", "latest", "load_checkpoint", "save_checkpoint", "wait_for_checkpoint"]
