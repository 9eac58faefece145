"""The random stream that a sharded model owns: swapped in while the model runs, forked inside regions."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcore.errors import NotSupportedError

# Weyl constant of the 64-bit golden ratio: distinct ranks get seeds that share no low-order pattern.
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = 62


def mix(seed: int, rank: int) -> int:
    """Return a seed for ``rank`` derived from a ``seed`` that all ranks share."""
    return (seed + _GOLDEN * (rank + 1)) % (1 << _SEED_BITS)


#: What is said where a second thread calls a model that is being called.
TWO_THREADS = (
    "two threads call one sharded model at a time: the ranks would exchange what does not belong together. "
    "Let one thread make all calls, or take a lock around each, in the same order on all ranks."
)


class _Fork(NamedTuple):
    """The states, of each device, that a fork needs to end."""

    before: list[Tensor]  # of the stream
    drawn: list[Tensor]  # of the stream, after the seed of the fork was drawn
    shared: list[Tensor]  # of the stream, after what was drawn from it inside the fork
    fresh: list[Tensor]  # of this rank, before anything was drawn


class RandomStream:
    """Generator states for the CPU and for the model's device, kept apart from the user's.

    All ranks of one tensor-parallel group hold the same stream, so a mask drawn outside regions is the same on each of
    them no matter how the user seeds the ranks. Inside a region, where every rank holds other heads or columns, the
    stream is *forked*: a seed drawn from it is mixed with the rank, and the shared state is put back at the exit.
    Because that seed is drawn from the stream itself, a checkpoint that restores the generators replays the fork. If
    nothing was drawn in it, the stream has not moved on. A fork ends those that were made in it and are open still.

    The stream follows the user's seeds as an unsharded model does: a call that may draw starts it from a number out of
    torch's generator, which moves on by that. It is the number of the first of the ranks that share the model, so that
    they agree however each is seeded. Once the user has said what the stream is (`shardcore.manual_seed`), it follows
    no more, and goes on by itself from call to call.

    Outside of calls ``_states`` holds the stream, and ``_levels`` is empty. In the outermost call (`enter` to `leave`)
    the process's generators hold it, ``_outside`` the user's states, ``_levels`` an entry for each module that was
    entered, and ``_forks`` one for each region that is open. Whatever ends the outermost call, an exception too, puts
    everything back.

    Args:
        seed: the seed that the group agreed on.
        rank: this rank's position on the tensor-parallel axis.
        device: where the model runs; the CPU generator is always part of the stream.
        forks: False for modules that stand alone. Nothing swaps their stream in and out, and each has one of its own: a
            fork would reach the user's generators, and another module's `join` would not put them back.

    Attributes:
        follows: whether calls that may draw start the stream from torch's generator.
        seed_of: returns the seed that follows from a number that all ranks have which share the model. None: the stream
            goes on by itself.
        group: those ranks, to which the first of them sends what it has drawn; None: this rank alone.
    """

    follows: bool = True
    seed_of: Callable[[int], int] | None = None
    group: ProcessGroup | None = None

    def __init__(self, seed: int, rank: int, device: torch.device, *, forks: bool = True) -> None:
        self._rank = rank
        self._may_fork = forks
        self._devices = ("cpu",) if device.type == "cpu" else ("cpu", str(device))
        self._states: list[Tensor] = []  # of each device, as all states here
        self._outside: list[Tensor] = []  # the user's states while the stream is in use
        # How many forks there were when each of the modules that use the stream now was entered.
        self._levels: list[int] = []
        #: Whether the stream is swapped in, so that a fork costs the user's generators nothing.
        self.in_use = False
        self._thread = 0  # that uses the stream
        self._forks: dict[Hashable, _Fork] = {}  # by region, in the order of entry
        self.seed(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomStream:
        clone = RandomStream(0, self._rank, torch.device(self._devices[-1]), forks=self._may_fork)
        clone._states = list(self.state().values())
        clone.follows, clone.seed_of, clone.group = self.follows, self.seed_of, self.group
        return clone

    def seed(self, seed: int) -> None:
        """Restart the stream from ``seed``."""
        if self._levels:  # the generators hold it
            self._seed_generators(seed)
            return
        states = {name: torch.Generator(name).manual_seed(seed).get_state() for name in self._devices}
        self.load(states)

    def state(self) -> dict[str, Tensor]:
        """Return the generator states by device name, as ``uint8`` tensors on the CPU."""
        states = self._read() if self._levels else self._states
        return {name: state.clone() for name, state in zip(self._devices, states, strict=True)}

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Continue from ``states``, as `state` returned them; raise if they are of other devices."""
        if set(states) != set(self._devices):
            raise ValueError(f"random state for {sorted(states)}; this model's stream has {sorted(self._devices)}")
        self._states = [states[name].clone() for name in self._devices]
        if self._levels:
            self._write(self._states)

    # Generator states cannot be traced: a compiled graph breaks here, and at the three below.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def enter(self, draws: Callable[[], bool] = lambda: False) -> None:
        """Swap the stream in, unless an enclosing module has done so; raise if another thread is running the model.

        The outermost call asks ``draws`` whether it may draw, alike on all ranks that share the model.
        """
        if not self._levels:
            seed = None
            if self.follows and self.seed_of is not None and draws():
                drawn = _draw()
                if self.group is not None:
                    number = torch.tensor(drawn, device="cpu")
                    dist.broadcast(number, group=self.group, group_src=0)
                    drawn = int(number)
                seed = self.seed_of(drawn)
            self._thread = threading.get_ident()
            self._outside = self._read()
            self._forks.clear()
            if seed is None:
                self._write(self._states)
            else:
                self._seed_generators(seed)
            self.in_use = True
        elif self._thread != threading.get_ident():
            raise NotSupportedError(TWO_THREADS)
        self._levels.append(len(self._forks))

    def number(self) -> int:
        """Draw a number to make seeds of: where the stream follows, out of torch's generator, of this rank alone."""
        if self.follows:
            return _draw()
        self.enter()
        try:
            return _draw()
        finally:
            self.leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """Swap the stream out again, or leave it to the enclosing module.

        No fork outlives the module that it was made in: one that was not joined, as after an exception, is undone.
        """
        if not self._levels:
            return
        for region in list(self._forks)[self._levels.pop() :][::-1]:
            self.join(region)
        if not self._levels:
            self._states = self._read()
            self._write(self._outside)
            self.in_use = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fork(self, region: Hashable, *, once: bool = False, rank: int | None = None) -> None:
        """Draw different numbers on each rank from here on, until `join` is called for the same region.

        Args:
            region: what the fork is known by. One of the same region that was cut short is replaced.
            once: do nothing if there is one.
            rank: which numbers this rank draws; by default, those of its position on the tensor-parallel axis.
        """
        if not self._may_fork or (once and region in self._forks):
            return
        before = self._read()
        seed = mix(_draw(), self._rank if rank is None else rank)
        shared = [torch.default_generator.get_state(), *before[1:]]
        self._seed_generators(seed)
        self.drop(region)  # so that this one is the last
        self._forks[region] = _Fork(before, shared, shared, self._read())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def join(self, region: Hashable) -> None:
        """Draw the same numbers on every rank again; does nothing if the region was not forked."""
        if region not in self._forks:
            return
        last = None
        while last != region:
            last, fork = self._forks.popitem()
        own = self._read()
        unused = fork.shared is fork.drawn and all(map(torch.equal, own, fork.fresh))
        self._write(fork.before if unused else fork.shared)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from what all ranks share, inside a forked region too; a region's own numbers go on afterwards."""
        if not self._forks:
            yield
            return
        region = next(reversed(self._forks))
        own = self._read()
        fork = self._forks[region]
        self._write(fork.shared)
        try:
            yield
        finally:
            self._forks[region] = fork._replace(shared=self._read())
            self._write(own)

    def forked(self, region: Hashable) -> bool:
        """Tell whether the stream is forked for this region."""
        return region in self._forks

    @property
    def forking(self) -> bool:
        """Whether each rank draws different numbers now."""
        return bool(self._forks)

    def drop(self, region: Hashable) -> None:
        """Forget a fork that was cut short, so that no later exit restores it."""
        self._forks.pop(region, None)

    @functools.cached_property
    def _generators(self) -> tuple[torch.Generator, ...]:
        """Those of the process, in the order of ``_devices``; torch makes those of a device when it first uses it."""
        return (torch.default_generator, *map(_device_generator, self._devices[1:]))

    def _seed_generators(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def _read(self) -> list[Tensor]:
        # In each call of a model, where a comprehension would be a call more.
        return [*map(torch.Generator.get_state, self._generators)]

    def _write(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _draw() -> int:
    # On the host, whatever the default device is: a device draw would wait for the device.
    return int(torch.randint(1 << _SEED_BITS, (), device="cpu").item())


def _device_generator(name: str) -> torch.Generator:
    device = torch.device(name)
    module = torch.get_device_module(device.type)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator
