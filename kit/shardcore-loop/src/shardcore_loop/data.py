"""Loading data over the data axes: the same batches on all ranks of one replica, others on every other replica."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from shardcore._env import torchrun
from shardcore.agree.agreement import Report, agreement
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import Sizes, group_of, replica_on
from shardcore.mesh.context import context_of, is_alone, unwrapped

Item = TypeVar("Item")

_END = object()


class _Sampler(DistributedSampler[Item]):
    """A `DistributedSampler` whose next pass may begin later than at the first sample."""

    begin = 0

    def __iter__(self) -> Iterator[Item]:
        begin, self.begin = self.begin, 0
        return itertools.islice(super().__iter__(), begin, None)


class ShardedDataLoader(DataLoader[Item]):
    """A `torch.utils.data.DataLoader` over the data axes whose position can be saved and taken up again.

    Each replica sees its part of the dataset (`torch.utils.data.DistributedSampler`); all tensor-parallel ranks of one
    replica get the same batches, whatever their own generators hold: randomness in the dataset comes from ``seed``, the
    epoch, the batch and the replica (in workers from the batch at which the pass began and those that came since). An
    epoch that was gone through makes the next one: ``set_epoch`` is needed only to jump.

    Args:
        dataset: a map-style dataset.
        replicas: the number of replicas; 1 if this is the only process.
        replica: which one this rank belongs to.
        batch_size: samples of one batch on one replica.
        shuffle: draw a new order in every epoch.
        seed: of the order and of the dataset's randomness; the same on all ranks.
        drop_last: leave out samples that do not fill a batch on all replicas. Otherwise the first samples are repeated
            so that all replicas have equally many, as `DistributedSampler` does it.
        **options: of `torch.utils.data.DataLoader` (``num_workers``, ``collate_fn``, ``pin_memory``, ...).

    Raises:
        ConfigError: there are several ranks, and nothing says which of them are replicas: use `of`.
        NotSupportedError: the dataset is an `IterableDataset`, which has no order that could be divided.
    """

    sampler: _Sampler[Item]

    def __init__(
        self,
        dataset: Dataset[Item],
        *,
        replicas: int | None = None,
        replica: int = 0,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if replicas is None and (ranks := _ranks_of_job()) > 1:
            raise ConfigError(
                f"a ShardedDataLoader of one of {ranks} ranks has to know which of them are replicas: use "
                "ShardedDataLoader.of(model, dataset, ...), or give replicas= and replica= (1 and 0 where all ranks "
                "get the same batches)"
            )
        replicas = replicas or 1
        if isinstance(dataset, IterableDataset):
            raise NotSupportedError(
                f"{type(dataset).__name__} is an IterableDataset, which only its own code can divide: let it skip the "
                f"samples of the other replicas (this rank belongs to replica {replica} of {replicas}) and pass it to "
                "torch.utils.data.DataLoader"
            )
        if not options.get("in_order", True):
            raise ConfigError(
                "in_order=False hands out batches as they are ready, so that ranks of one replica would get different "
                "ones; leave it out"
            )
        for name in options.keys() & {"sampler", "batch_sampler", "generator"}:
            raise ConfigError(
                f"ShardedDataLoader makes the {name} itself, from shuffle= and seed=; leave it out, or make a "
                "torch.utils.data.DataLoader with a sampler of your own"
            )
        sampler: _Sampler[Item] = _Sampler(
            dataset, num_replicas=replicas, rank=replica, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self._seed = seed
        self._done = 0  # batches of this epoch that were handed out, by the pass that was last asked
        self._begin = 0  # where the next pass begins
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            generator=torch.Generator(),
            **options,
        )

    @classmethod
    def of(cls, place: nn.Module | DeviceMesh | None, dataset: Dataset[Item], **options: Any) -> Self:
        """Return a loader for the replica that this rank belongs to; every rank calls it with the same arguments.

        ```python
        model = shardcore.shard(model, tp=2, dp=2)
        loader = shardcore_loop.ShardedDataLoader.of(model, dataset, batch_size=8, shuffle=True)
        ```

        Args:
            place: a sharded model, or a mesh; None for one rank alone.
            dataset: a map-style dataset.
            **options: further arguments of the class.

        Raises:
            AgreementError: the ranks' arguments or numbers of samples differ: they would see other samples.
            ConfigError: the model was not sharded, or only on some of the ranks, so that nobody knows its replicas.
            NotSupportedError: the dataset is an `IterableDataset`.
        """
        mesh = _mesh_of(place)
        replicas, replica = (1, 0) if mesh is None else (Sizes.of(mesh).replicas, replica_on(mesh))
        with agreement(group=None if mesh is None else group_of(mesh)) as own:
            loader = cls(dataset, replicas=replicas, replica=replica, **options)
            settings = {**loader._settings(), "batch_size": loader.batch_size}
            own.report = Report(items=tuple((f"the loader's {name}", str(value)) for name, value in settings.items()))
        return loader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator class
        """Go through the rest of the epoch, or through a whole one."""
        epoch, done = self.sampler.epoch, self._begin
        self._begin, self._done = 0, done
        self.sampler.begin = done * (self.batch_size or 1)
        self.generator.manual_seed(self._seed_of(epoch, done))
        batches = super().__iter__()
        while True:
            with self._randomness(epoch, done):
                batch = next(batches, _END)
            if batch is _END:
                break
            done += 1
            self._done = done
            yield batch
        self._done = 0
        self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Jump to an epoch, counted from 0; the order of a shuffled one depends on it.

        A position that was loaded stays if it lies in this epoch.
        """
        if epoch != self.sampler.epoch:
            self._begin = self._done = 0
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: where the next batch would come from. Does not depend on the number of ranks."""
        return {"epoch": self.sampler.epoch, "samples": self._done * self._stride, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a position again; the next pass begins there.

        The number of replicas and the batch size may have changed, as long as the position lies between two batches.

        Raises:
            ConfigError: the position belongs to another dataset or order, or lies inside a batch.
        """
        for name, mine in self._settings().items():
            if state.get(name) != mine:
                raise ConfigError(f"the saved position has {name} {state.get(name)!r}, and this loader {mine!r}")
        ended = state["samples"] >= len(self.dataset)  # type: ignore[arg-type]  # map-style
        if state["samples"] % self._stride and not ended:
            raise ConfigError(
                f"the saved position lies after {state['samples']} samples, which are no whole batches of "
                f"{self.batch_size} on {self.sampler.num_replicas} replicas; use a batch size that divides them"
            )
        self.set_epoch(state["epoch"])
        self._begin = self._done = len(self) if ended else state["samples"] // self._stride

    @property
    def _stride(self) -> int:
        """Samples that one batch takes on all replicas together."""
        return (self.batch_size or 1) * self.sampler.num_replicas

    def _settings(self) -> dict[str, Any]:
        """Return what has to be the same where a position is taken up again, besides the samples before it."""
        return {
            "seed": self._seed,
            "shuffle": self.sampler.shuffle,
            "drop_last": self.sampler.drop_last,
            "samples_in_dataset": len(self.dataset),  # type: ignore[arg-type]  # map-style
        }

    def _seed_of(self, *place: int) -> int:
        """Return a seed for a place in the data of this replica, the same on all its ranks."""
        return random.Random(repr((self._seed, self.sampler.rank, *place))).getrandbits(62)

    @contextlib.contextmanager
    def _randomness(self, epoch: int, batch: int) -> Iterator[None]:
        """Let the dataset draw numbers that depend on the batch alone, and leave this process's generators as they are.

        Workers are seeded by the loader's generator instead.
        """
        if self.num_workers:
            yield
            return
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = self._seed_of(epoch, batch)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def _ranks_of_job() -> int:
    return dist.get_world_size() if dist.is_initialized() else getattr(torchrun(), "world_size", 1)


def _mesh_of(place: nn.Module | DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of a sharded model, or the one that was given, if it knows all replicas; None on one rank."""
    mesh = None if isinstance(place, nn.Module) else place
    if isinstance(place, nn.Module):
        model = unwrapped(place)
        if (context := context_of(model)) is None and not is_alone(model):
            raise ConfigError(
                f"ShardedDataLoader.of got a {type(model).__name__} that was not sharded; call shardcore.shard() first"
            )
        mesh = None if context is None else context.mesh
    ranks, world = 1 if mesh is None else mesh.size(), dist.get_world_size() if dist.is_initialized() else 1
    if ranks < world and (mesh is None or Sizes.of(mesh).replicas == 1):
        raise ConfigError(
            f"the {world} ranks are not all on this mesh ({ranks}), and nothing says which of them are replicas; give "
            "ShardConfig a device_mesh with an axis 'dp_shard' or 'dp_replicate'"
        )
    return mesh
