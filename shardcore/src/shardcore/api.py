"""What users call: `shard`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardcore.agree.agreement import agree
from shardcore.agree.received import receive
from shardcore.apply.errors import tell_once
from shardcore.apply.launch import start_process_group
from shardcore.apply.shardable import check_model
from shardcore.apply.sharder import ModelSharder
from shardcore.clients import attached_to, unpacking
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError
from shardcore.fsdp.optimizers import held_elsewhere, warn_of_stale_optimizers
from shardcore.fsdp.phase import Fsdp, Wrap
from shardcore.inferred import Inference, inference
from shardcore.mesh.axes import group_of
from shardcore.pipeline.model import Pipelining, Stepping
from shardcore.plan.shard_plan import ModelPhase
from shardcore.policy import Policy
from shardcore.weights.weights import Materializing, Place, Weights

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    config: ShardConfig | None = None,
    *,
    policy: Policy | type[Policy] | Mapping[str, Any] | Literal["infer"] | None = None,
    infer: Inference = "proved",
    optimizer: Optimizer | None = None,
    wrap: Wrap = True,
    sync_from: int | None = None,
    weights: Weights | Place | None = None,
    **fields: Any,
) -> Model:
    """Shard ``model`` over the ranks, in place, and return it.

    ```python
    model = LlamaForCausalLM.from_pretrained(path)
    model = shardcore.shard(model, tp=2)           # under: torchrun --nproc-per-node 2 train.py
    optimizer = torch.optim.AdamW(model.parameters())
    ```

    Every rank calls it with the same model, weights and arguments; any difference is an error on every rank, before
    anything is changed. The default process group is started from torchrun's variables if there is none: with NCCL
    where CUDA is available (parameters then move to this rank's device part by part), else with gloo. With a data axis
    FSDP2 is applied block by block.

    Args:
        model: any model that an installed pack serves (or any module at all, with ``policy``).
        config: the configuration; ``fields`` override it.
        policy: a policy or its class, used instead of looking for one among the installed packs; or a mapping of paths
            to words, such as a ``tp_plan`` (`shardcore.compile.DataPolicy`). ``"infer"`` infers one for a class that no
            pack serves, from what a small copy computes.
        infer: ``"proved"`` trains that copy on two processes, and raises unless it is exact and half of the model's
            parameters are split; ``"proved_in_part"`` splits what it can, and ``"drafted"`` proves nothing.
        optimizer: an optimizer made before this call and not stepped yet; its parameter groups are re-pointed in place.
            Its class, settings and groups have to be the same on every rank.
        wrap: apply FSDP2 over the data axes; False leaves that to the caller. A mapping has options of ``fully_shard``
            (``mp_policy``, ``offload_policy``, ``reshard_after_forward``), with which it is applied without replicas
            too: ``wrap={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}``.
        sync_from: take the weights and the training mode of this global rank instead of requiring equal ones; the
            models of the others may be on the meta device.
        weights: read the values from here, each rank its own part: a ``.safetensors`` file, a list of them, or a folder
            that holds them, with the names that ``model.state_dict()`` has. The model may be on the meta device, and is
            never there as a whole. For what a library has saved see `shardcore.from_pretrained`.
        **fields: any field of `ShardConfig`; ``tp``, ``dp``, ``pp`` and ``ep`` are short names.

    Raises:
        ConfigError: arguments contradict each other or the number of ranks, or ranks are missing altogether.
        NoPolicyError: no installed pack serves the model's class.
        PlanError: the policy does not fit the model at these sizes; lists every problem.
        AgreementError: another rank failed, or holds something else.
        AlreadyShardedError: the model was sharded before.
        PartlyShardedError: a policy's own code, or FSDP2, failed on a rank after models were changed, all unusable now.
    """
    with failing_together(config, fields):
        config = ShardConfig.of(config, **fields)
        check_model(model)
        if isinstance(policy, str) and policy != "infer":
            raise ConfigError(f"policy={policy!r}; wanted a policy, its class, a mapping of paths to words, or 'infer'")
        if policy == "infer":
            inference()  # which raises where nothing is installed that infers
        held = held_elsewhere(model) if optimizer is None else {}
        attached = attached_to(model)
        inner = model if attached is None else attached.model
        if attached is not None and sync_from is not None:
            attached.receive = lambda module: receive(module, sync_from, config.group())
        # The order in which a model becomes a sharded one, after its layers.
        fsdp = Fsdp(model, inner, optimizer, wrap)
        phases: list[ModelPhase] = [
            *unpacking(inner),  # linears of quantized weights
            *([] if attached is None else [attached]),  # adapters
            Pipelining(inner, fsdp.dtype),  # this rank keeps its stages
            fsdp,  # FSDP2, and the optimizer
            *([] if weights is None else [Materializing(inner, weights, sync_from)]),  # values
            Stepping(inner),  # train_step
        ]
    if policy == "infer":
        start_process_group(config)
        agree(group=config.group())  # with a rank on which something of the above has failed
        policy = inference()(inner, infer, config.group())  # one rank for all
    with failing_together(config, fields):
        sharder = ModelSharder(inner, policy, config, sync_from=sync_from, phases=phases)
    start_process_group(config)
    sharder.shard()  # discover, resolve, compile, agree, apply; then the phases
    if optimizer is None:
        warn_of_stale_optimizers(held, model)
    return model


@contextlib.contextmanager
def failing_together(config: object, fields: Mapping[str, Any]) -> Iterator[None]:
    """Let what fails here before there is a sharder fail on the other ranks too, where ranks can talk already."""
    try:
        yield
    except BaseException as error:  # what ends this process too: the other ranks wait for a report
        tell_once()
        given = [fields.get(name) for name in ("device_mesh", "tensor_parallel_process_group")]
        if isinstance(config, ShardConfig):
            given += [config.device_mesh, config.tensor_parallel_process_group]
        place = next((value for value in given if value is not None), None)
        if isinstance(place, DeviceMesh) and place.get_coordinate() is not None:
            agree(failure=error, group=group_of(place))
        elif isinstance(place, ProcessGroup | None):
            agree(failure=error, group=place)
        # Who would answer cannot be known from a place that is neither a mesh nor a group.
        raise
