"""What users call: `shard`, and `ShardFormer` for those who know it from ColossalAI."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shardcore.agree.agreement import Report, agree
from shardcore.apply.launch import start_process_group, world_size
from shardcore.apply.shardable import check_model
from shardcore.apply.sharder import ModelSharder
from shardcore.clients import Attaching, attached_to
from shardcore.config import ShardConfig
from shardcore.data import ShardedDataLoader
from shardcore.errors import ConfigError
from shardcore.fsdp.optimizers import held_elsewhere, warn_of_stale_optimizers
from shardcore.fsdp.phase import Fsdp, Wrap
from shardcore.inferred import Inference, inferred
from shardcore.mesh import group_of
from shardcore.mesh.groups import ProcessGroupManager
from shardcore.pipeline.making import Pipelining, Stepping
from shardcore.plan.phases import ModelPhase
from shardcore.policy import Policy
from shardcore.weights.loading import Filling
from shardcore.weights.reading import Reading
from shardcore.weights.weights import Place, Weights

__all__ = ["ShardFormer", "failing_together", "shard", "shard_new"]

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    config: ShardConfig | None = None,
    *,
    policy: Policy | type[Policy] | Literal["infer"] | None = None,
    infer: Inference = "proved",
    optimizer: Optimizer | None = None,
    wrap: Wrap = True,
    sync_from: int | None = None,
    weights: Weights | Place | None = None,
    reading: Reading = "auto",
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
        policy: a policy or its class, used instead of looking for one among the installed packs. ``"infer"`` infers one
            for a class that no pack serves, from what a small copy computes that is built from its configuration.
        infer: with ``policy="infer"``: ``"proved"`` trains the small copy on two processes first, and raises unless
            outputs, loss and gradients are those of the unsharded one; ``"drafted"`` does not.
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
        reading: of ``weights``: ``"slices"``, every rank reads its parts; ``"scatter"``, one rank of each host reads
            and sends the others their parts; ``"auto"``, the second where the files are on a network file system.
        **fields: any field of `ShardConfig`; ``tp``, ``dp``, ``pp`` and ``ep`` are short names.

    Raises:
        ConfigError: arguments contradict each other or the number of ranks, or ranks are missing altogether.
        NoPolicyError: no installed pack serves the model's class.
        PlanError: the policy does not fit the model at these sizes; lists every problem.
        AgreementError: another rank failed, or holds something else.
        AlreadyShardedError: the model was sharded before.
        PartlyShardedError: a policy's own code, or FSDP2, failed on a rank after models were changed, all unusable now.
    """
    held = held_elsewhere(model) if optimizer is None and isinstance(model, nn.Module) else {}
    shard_new(
        model,
        config,
        policy=policy,
        infer=infer,
        optimizer=optimizer,
        wrap=wrap,
        sync_from=sync_from,
        weights=weights,
        reading=reading,
        **fields,
    )
    if optimizer is None:
        warn_of_stale_optimizers(held, model, stacklevel=2)
    return model


def shard_new(
    model: Model,
    config: ShardConfig | None = None,
    *,
    policy: Policy | type[Policy] | Literal["infer"] | None = None,
    infer: Inference = "proved",
    optimizer: Optimizer | None = None,
    wrap: Wrap = True,
    sync_from: int | None = None,
    weights: Weights | Place | None = None,
    reading: Reading = "auto",
    **fields: Any,
) -> Model:
    """Do what `shard` does for a model whose parameters nobody else holds: no optimizer is looked for."""
    with failing_together(config, fields):
        config = ShardConfig.of(config, **fields)
        check_model(model)
        attached = attached_to(model)
        inner = model if attached is None else attached.model
        if weights is None and reading != "auto":
            raise ConfigError(f"reading={reading!r} says who reads weights=, which are not given")
        if isinstance(policy, str) and policy != "infer":
            raise ConfigError(f"policy={policy!r}; wanted a policy, its class, or 'infer'")
        # The order in which a model becomes a sharded one, after its layers.
        fsdp = Fsdp(model, optimizer, wrap=wrap, inner=inner)
        pipelining = Pipelining(inner, fsdp.dtype)
        phases: list[ModelPhase] = [
            *([] if attached is None else [Attaching(attached, sync_from, config.group)]),  # adapters
            pipelining,  # this rank keeps its stages
            fsdp,  # FSDP2, and the optimizer
            *([] if weights is None else [Filling(inner, weights, sync_from, reading)]),  # values
            Stepping(inner, pipelining),  # train_step
        ]
    if policy == "infer":
        start_process_group(config)
        agree(Report(), group=config.group())  # with a rank on which something of the above has failed
        policy = inferred(inner, infer, config.group())  # one rank for all
    with failing_together(config, fields):
        sharder = ModelSharder(inner, policy, config, sync_from=sync_from, phases=phases)
    start_process_group(config)
    sharder.shard()  # discover, resolve, compile, agree, apply; then the phases
    return model


@contextlib.contextmanager
def failing_together(config: object, fields: Mapping[str, Any]) -> Iterator[None]:
    """Let what fails here before there is a sharder fail on the other ranks too, where ranks can talk already."""
    try:
        yield
    except BaseException as error:  # what ends this process too: the other ranks wait for a report
        _tell_others(error, config, fields)
        raise


def _tell_others(error: BaseException, config: object, fields: Mapping[str, Any]) -> None:
    given = [fields.get(name) for name in ("device_mesh", "tensor_parallel_process_group")]
    if isinstance(config, ShardConfig):
        given += [config.device_mesh, config.tensor_parallel_process_group]
    place = next((value for value in given if value is not None), None)
    if isinstance(place, DeviceMesh) and place.get_coordinate() is not None:
        agree(Report.of_error(error), error, group=group_of(place))
    elif isinstance(place, ProcessGroup | None):
        agree(Report.of_error(error), error, group=place)
    # Who would answer cannot be known from a place that is neither a mesh nor a group.


class ShardFormer:
    """Shards models, and divides datasets, by one configuration.

    ```python
    former = ShardFormer(shard_config=ShardConfig(tensor_parallel_size=2))
    former.init_distributed()
    model = former.shard_model(model)
    loader = former.shard_dataset(dataset, batch_size=8)
    ```

    `shard` does the same for one model in one line. After Shardformer's ``ShardFormer`` (ColossalAI).

    Args:
        shard_config: the configuration.

    Attributes:
        shard_config: the configuration.
        pg_manager: the process groups; None before `init_distributed`.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = ShardConfig.of(shard_config)
        self.pg_manager: ProcessGroupManager | None = None

    def init_distributed(self) -> ProcessGroupManager:
        """Start the default process group if there is none, and make the groups of the configuration's mesh.

        Every rank calls it; a second call returns what the first one made.

        Raises:
            ConfigError: the sizes do not fit the number of ranks, or ranks are missing altogether.
        """
        # One rank alone may have been asked before the process group was started.
        if self.pg_manager is None or (self.pg_manager.mesh is None and dist.is_initialized()):
            config = self.shard_config
            start_process_group(config)
            mesh = config.resolve(world_size(config)).mesh() if dist.is_initialized() else None
            self.pg_manager = ProcessGroupManager(mesh)
        return self.pg_manager

    def shard_model(
        self, model: Model, policy: Policy | type[Policy] | None = None, *, optimizer: Optimizer | None = None
    ) -> Model:
        """Shard ``model`` in place and return it: `shard` by this configuration.

        Args:
            model: the unsharded model.
            policy: a policy or its class, used instead of looking for one among the installed packs.
            optimizer: an optimizer made before this call; its parameter groups are re-pointed in place.

        Raises:
            ShardcoreError: what `shard` raises.
        """
        mesh = self.init_distributed().mesh
        config = self.shard_config
        if mesh is not None and config.tensor_parallel_process_group is None:
            config = ShardConfig.of(config, device_mesh=mesh)
        return shard(model, config, policy=policy, optimizer=optimizer)

    def optimize(
        self, model: Model, policy: Policy | type[Policy] | None = None
    ) -> tuple[Model, list[dict[int, nn.Parameter]]]:
        """Shard ``model`` and return it with an empty list, where Shardformer has what pipeline stages share.

        Nobody has to care for those parameters: a training step of the pipeline keeps them equal.

        Raises:
            ShardcoreError: what `shard` raises.
        """
        return self.shard_model(model, policy), []

    def shard_dataset(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> ShardedDataLoader[Any]:
        """Return a loader over this replica's part of ``dataset``; see `shardcore.data.ShardedDataLoader`.

        Args:
            dataset: a map-style dataset.
            batch_size: samples of one batch on one replica.
            shuffle: draw a new order in every epoch.
            seed: of the order and of the dataset's randomness; the same on all ranks.
            drop_last: leave out samples that do not fill a batch on all replicas.
            **options: of `torch.utils.data.DataLoader`.

        Every rank calls it with the same arguments; this is checked.

        Raises:
            AgreementError: the ranks' arguments or numbers of samples differ.
            ConfigError: the configuration has a tensor-parallel process group that does not hold all ranks, so that
                nobody knows which ranks are replicas.
            NotSupportedError: the dataset is an `IterableDataset`.
        """
        groups = self.init_distributed()
        self._require_known_replicas()
        loader = ShardedDataLoader(
            dataset,
            replicas=groups.size("dp"),
            replica=groups.rank("dp"),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **options,
        )
        # Ranks with another seed or dataset would see other samples, in silence.
        items = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "batch_size": batch_size}
        told = [(f"shard_dataset({name}=)", str(value)) for name, value in items.items()]
        agree(Report(items=(*told, ("the number of samples", str(len(dataset))))), group=self.shard_config.group())  # type: ignore[arg-type]  # map-style
        return loader

    def _require_known_replicas(self) -> None:
        group = self.shard_config.tensor_parallel_process_group
        if group is not None and group.size() < dist.get_world_size():
            raise ConfigError(
                f"the {dist.get_world_size()} ranks are not all in tensor_parallel_process_group ({group.size()}), and "
                "nothing says which of them are replicas; give ShardConfig a device_mesh with an axis 'dp_shard' or "
                "'dp_replicate'"
            )
