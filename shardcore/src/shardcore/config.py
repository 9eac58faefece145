"""How a model is to be sharded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from shardcore.errors import ConfigError
from shardcore.mesh import PartialGradients

__all__ = ["ShardConfig"]

#: Short names of `shardcore.shard`, and the fields they stand for.
SHORT_NAMES = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """How a model is to be sharded. Sizes count ranks; ``None`` is derived from the number of ranks.

    Attributes:
        tensor_parallel_size: ranks that share every layer. Derived: all ranks that no data axis takes.
        data_parallel_size: model replicas, each with other data; the product of the two fields below.
        dp_replicate_size: replicas that hold whole parameters (default 1).
        dp_shard_size: ranks over which parameters, gradients and optimizer state are sharded by FSDP2. Derived: all
            data-parallel ranks.
        partial_gradients: ``"in_backward"`` sums the partial gradients of replicated parameters inside each backward;
            ``"deferred"`` leaves them to one `shardcore.reduce_partial_gradients` for each step.

    Raises:
        ConfigError: a size is not a positive integer, sizes contradict each other, or a mode is unknown.
    """

    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    partial_gradients: PartialGradients = "in_backward"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_size") and value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"ShardConfig.{field.name} must be a positive integer or None, got {value!r}")
        if self.partial_gradients not in get_args(PartialGradients):
            raise ConfigError(
                f"ShardConfig.partial_gradients must be one of {', '.join(map(repr, get_args(PartialGradients)))}, "
                f"got {self.partial_gradients!r}"
            )
        data, replicate, shard = self.data_parallel_size, self.dp_replicate_size, self.dp_shard_size
        if data and replicate and shard and data != replicate * shard:
            raise ConfigError(
                f"ShardConfig.data_parallel_size {data} is not dp_replicate_size {replicate} times dp_shard_size "
                f"{shard}; leave one of the three None"
            )

    @classmethod
    def of(cls, config: ShardConfig | None = None, **fields: Any) -> ShardConfig:
        """Return ``config`` with ``fields`` replaced; short names (tp, dp) are understood.

        Raises:
            ConfigError: ``config`` is something else, or a field is unknown or given twice under two names.
        """
        if not isinstance(config, cls | None):
            raise ConfigError(f"wanted a ShardConfig, got {config!r}; sizes are given by name: tp=2, dp=2")
        known = {field.name for field in dataclasses.fields(cls)}
        full: dict[str, Any] = {}
        for name, value in fields.items():
            target = SHORT_NAMES.get(name, name)
            if target not in known:
                names = ", ".join(sorted(known | set(SHORT_NAMES)))
                raise ConfigError(f"unknown configuration field {name!r}; the fields are {names}")
            if target in full:
                raise ConfigError(f"{name!r} and another name for {target} were both given; give one of them")
            full[target] = value
        return dataclasses.replace(config or cls(), **full)

    def resolve(self, world_size: int) -> ShardConfig:
        """Return the configuration with every size filled in for ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not multiply to ``world_size``.
        """
        data = self.data_parallel_size
        if data is None and self.dp_shard_size:
            data = self.dp_shard_size * (self.dp_replicate_size or 1)
        tensor = self.tensor_parallel_size
        if tensor is None:
            tensor = max(1, world_size // (data or self.dp_replicate_size or 1))
        if data is None:
            data = max(1, world_size // tensor)
        if tensor * data != world_size:
            raise ConfigError(
                f"tensor_parallel_size {tensor} times data_parallel_size {data} is {tensor * data}, but there "
                f"{'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}; "
                f"start {tensor * data} ranks (torchrun --nproc-per-node {tensor * data} ...) or change the sizes"
            )
        replicate = self.dp_replicate_size or (data // self.dp_shard_size if self.dp_shard_size else 1)
        shard = self.dp_shard_size or data // replicate
        if replicate * shard != data:
            raise ConfigError(
                f"dp_replicate_size {replicate} times dp_shard_size {shard} is {replicate * shard}, but "
                f"data_parallel_size is {data}"
            )
        return dataclasses.replace(
            self,
            tensor_parallel_size=tensor,
            data_parallel_size=data,
            dp_replicate_size=replicate,
            dp_shard_size=shard,
        )
