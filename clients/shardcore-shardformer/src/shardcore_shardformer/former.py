"""`ShardFormer`: models and datasets by one configuration, for those who know it from ColossalAI."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shardcore.api import shard
from shardcore.apply.launch import start_process_group, world_size
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError
from shardcore.policy import Policy
from shardcore_loop import ShardedDataLoader
from shardcore_shardformer.config import ShardConfig as SquareConfig
from shardcore_shardformer.groups import ProcessGroupManager
from shardcore_shardformer.summa.sharding import shard_in_square

Model = TypeVar("Model", bound=nn.Module)


class ShardFormer:
    """Shards models, and divides datasets, by one configuration.

    ```python
    former = ShardFormer(shard_config=ShardConfig(tensor_parallel_size=2))
    former.init_distributed()
    model = former.shard_model(model)
    loader = former.shard_dataset(dataset, batch_size=8)
    ```

    `shardcore.shard` does the same for one model in one line. After ColossalAI's ``ShardFormer``.

    Args:
        shard_config: the configuration.

    Attributes:
        shard_config: the configuration.
        pg_manager: the process groups; None before `init_distributed`.
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = ShardConfig.of(shard_config)
        self.pg_manager: ProcessGroupManager | None = None

    @property
    def _sizes(self) -> ShardConfig:
        """What says how many ranks there are: in that a square is like a line."""
        if isinstance(self.shard_config, SquareConfig):
            return dataclasses.replace(self.shard_config, tensor_parallel_mode="1d")
        return self.shard_config

    def init_distributed(self) -> ProcessGroupManager:
        """Start the default process group if there is none, and make the groups of the configuration's mesh.

        Every rank calls it; a second call returns what the first one made.

        Raises:
            ConfigError: the sizes do not fit the number of ranks, or ranks are missing altogether.
        """
        # One rank alone may have been asked before the process group was started.
        if self.pg_manager is None or (self.pg_manager.mesh is None and dist.is_initialized()):
            config = self._sizes
            start_process_group(config)
            mesh = config.resolve(world_size(config)).mesh() if dist.is_initialized() else None
            self.pg_manager = ProcessGroupManager(mesh)
        return self.pg_manager

    def shard_model(
        self,
        model: Model,
        policy: Policy | type[Policy] | Mapping[str, Any] | None = None,
        *,
        optimizer: Optimizer | None = None,
    ) -> Model:
        """Shard ``model`` in place and return it: `shardcore.shard` by this configuration.

        Args:
            model: the unsharded model.
            policy: a policy or its class, used instead of looking for one among the installed packs.
            optimizer: an optimizer made before this call; its parameter groups are re-pointed in place.

        With ``tensor_parallel_mode="2d"`` all ranks divide each tensor of the model as a square, which needs no policy:
        see `shardcore_shardformer.summa`.

        Raises:
            ShardcoreError: what `shardcore.shard` raises.
            NotSupportedError: a square was given a policy, or an optimizer.
        """
        mesh = self.init_distributed().mesh
        config = self.shard_config
        if isinstance(config, SquareConfig) and config.tensor_parallel_mode == "2d":
            for name, given in (("policy", policy), ("optimizer", optimizer)):
                if given is not None:
                    raise NotSupportedError(
                        f"shard_model({name}=) with tensor_parallel_mode='2d': a square needs no policy, and an "
                        "optimizer is made after it; leave it out"
                    )
            return shard_in_square(model, config)
        if mesh is not None and config.tensor_parallel_process_group is None:
            config = ShardConfig.of(config, device_mesh=mesh)
        return shard(model, config, policy=policy, optimizer=optimizer)

    def optimize(
        self, model: Model, policy: Policy | type[Policy] | Mapping[str, Any] | None = None
    ) -> tuple[Model, list[dict[int, nn.Parameter]]]:
        """Shard ``model`` and return it with an empty list, where Shardformer has what pipeline stages share.

        Nobody has to care for those parameters: a training step of the pipeline keeps them equal.

        Raises:
            ShardcoreError: what `shardcore.shard` raises.
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
        """Return a loader over this replica's part of ``dataset``; see `shardcore_loop.ShardedDataLoader`.

        Args:
            dataset: a map-style dataset.
            batch_size: samples of one batch on one replica.
            shuffle: draw a new order in every epoch.
            seed: of the order and of the dataset's randomness; the same on all ranks.
            drop_last: leave out samples that do not fill a batch on all replicas.
            **options: of `torch.utils.data.DataLoader`.

        Every rank calls it with the same arguments; this is checked.

        Raises:
            ShardcoreError: what `shardcore_loop.ShardedDataLoader.of` raises.
        """
        return ShardedDataLoader.of(
            self.init_distributed().mesh,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **options,
        )
