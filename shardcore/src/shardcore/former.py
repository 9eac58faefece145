"""What users call: `shard`."""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardcore._env import torchrun
from shardcore.agreement import Report, agree
from shardcore.config import ShardConfig
from shardcore.data_parallel import apply_data_parallel
from shardcore.errors import ConfigError, NotSupportedError, StaleOptimizerWarning
from shardcore.policy import Policy
from shardcore.sharder import ModelSharder

__all__ = ["shard"]

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    config: ShardConfig | None = None,
    *,
    policy: Policy | type[Policy] | None = None,
    optimizer: Optimizer | None = None,
    wrap: bool = True,
    sync_from: int | None = None,
    **fields: Any,
) -> Model:
    """Shard ``model`` over the ranks, in place, and return it.

    ```python
    model = LlamaForCausalLM.from_pretrained(path)
    model = shardcore.shard(model, tp=2)           # under: torchrun --nproc-per-node 2 train.py
    optimizer = torch.optim.AdamW(model.parameters())
    ```

    Every rank calls it with the same model, weights and arguments; this is checked before anything is changed, and any
    difference is an error on every rank. The default process group is started from torchrun's variables if there is
    none: with NCCL where CUDA is available (parameters then move to this rank's device part by part), else with gloo.
    With a data axis FSDP2 is applied block by block.

    Args:
        model: any model that an installed pack serves (or any module at all, with ``policy``).
        config: the configuration; ``fields`` override it.
        policy: a policy or its class, used instead of looking for one among the installed packs.
        optimizer: an optimizer made before this call and not stepped yet; its parameter groups are re-pointed in place.
        wrap: apply FSDP2 over the data axes; False leaves that to the caller.
        sync_from: take the weights of this global rank instead of requiring equal ones.
        **fields: any field of `ShardConfig`; ``tp`` and ``dp`` are short names.

    Raises:
        ConfigError: arguments contradict each other or the number of ranks, or ranks are missing altogether.
        NoPolicyError: no installed pack serves the model's class.
        PlanError: the policy does not fit the model at these sizes; lists every problem.
        AgreementError: another rank failed, or holds something else.
        AlreadyShardedError: the model was sharded before.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    check = None if optimizer is None else functools.partial(_check_optimizer, optimizer, names)
    try:
        config = ShardConfig.of(config, **fields)
        sharder = ModelSharder(model, policy, config, sync_from=sync_from, check=check)
    except Exception as error:
        agree(Report.of_error(error), error)  # where ranks can talk already, an error on one is an error on all
        raise
    _start_process_group(config)
    sharder.shard()
    context = sharder.context
    if context is None or sharder.plan is None:
        return model
    if wrap:
        apply_data_parallel(model, context, sharder.plan.stages)
    changed = context.size > 1 or (wrap and dist.get_world_size() > 1)
    if optimizer is not None:
        _repoint(optimizer, names, dict(model.named_parameters()))
    elif changed:
        _warn_of_stale_optimizers(names)
    return model


def _start_process_group(config: ShardConfig) -> None:
    """Start the default process group from torchrun's variables.

    Raises:
        ConfigError: several ranks are wanted and there is neither a process group nor torchrun.
    """
    if dist.is_initialized():
        return
    env = torchrun()
    if env is None:
        sizes = (config.tensor_parallel_size, config.data_parallel_size, config.dp_replicate_size, config.dp_shard_size)
        wanted = max(1, *(size or 1 for size in sizes))
        if wanted > 1:
            raise ConfigError(
                f"sharding over {wanted} ranks needs that many processes, and this one was started alone. Start it "
                f"with: torchrun --nproc-per-node {wanted} your_script.py (or call "
                "torch.distributed.init_process_group first)"
            )
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(env.local_rank or 0)
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")


def _check_optimizer(optimizer: Optimizer, names: dict[int, str]) -> None:
    if optimizer.state:
        raise NotSupportedError(
            f"this {type(optimizer).__name__} holds state already, which cannot be re-pointed. Make it after shard(), "
            "and load its state with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"optimizer= holds {foreign} parameters that are not the model's; pass the optimizer that was made from "
            "this model's parameters, or make it after shard()"
        )


def _repoint(optimizer: Optimizer, names: dict[int, str], parameters: dict[str, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        # The list itself is kept: some optimizers hold a second reference to it.
        group["params"][:] = [parameters[names[id(p)]] for p in group["params"]]


def _warn_of_stale_optimizers(names: dict[int, str]) -> None:
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), Optimizer):
            continue
        held = [names[id(p)] for g in candidate.param_groups for p in g["params"] if id(p) in names]
        if held:
            warnings.warn(
                f"a {type(candidate).__name__} was made before shard() and still holds {len(held)} of the old "
                f"parameters (first: {held[0]}): its steps will change nothing. Make it after shard(), or pass it as "
                "shard(..., optimizer=optimizer).",
                StaleOptimizerWarning,
                stacklevel=3,
            )
