"""What sharding a model changes in torch for the whole process: docs/process.md lists it."""

from __future__ import annotations

from shardcore.nn.assigned_data import refuse_dropped_data
from shardcore.nn.ddp import refuse_ddp_around_sharded
from shardcore.nn.draws import refuse_draws_on_cpu
from shardcore.nn.numbers import warn_of_partial_numbers
from shardcore.nn.optimizers import prepare_steps
from shardcore.nn.scaling import find_inf_on_all_ranks
from shardcore.nn.slices import refuse_lost_writes

__all__ = ["watch_torch"]


def watch_torch() -> None:
    """Let torch say or do what DTensors and their optimizers lack; the first call acts."""
    warn_of_partial_numbers()
    refuse_lost_writes()
    refuse_dropped_data()
    refuse_draws_on_cpu()
    refuse_ddp_around_sharded()
    find_inf_on_all_ranks()
    prepare_steps()
