"""How fast a training is: tokens for each second, the use of the device, the share of collectives, memory by rank."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardcore._torch import backward_task
from shardcore.errors import ConfigError
from shardcore.mesh.axes import Sizes
from shardcore.mesh.context import context_of
from shardcore_loop.profiling import collectives_of, covered

#: Operations of a device in a second, of products in bfloat16 without sparsity, as their makers state them; by what its
#: name contains, the more special name first.
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}
_COUNTED, _PROFILED = 2, 3  # the steps that are looked at; the first one is unlike all others


@dataclass
class Step:
    """One step of a training: the ``tokens`` that this replica trains on in it."""

    tokens: int


class StepMeter:
    """Says how fast the steps of a training are: rank 0 prints a line, and `numbers` has what a tracker logs.

    ```python
    meter = shardcore_loop.StepMeter(model)
    for batch in loader:
        with meter.step(tokens=batch["input_ids"].numel()):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ```

        step 20: 31.2 ms, 16,410 tokens/s, MFU 38 %, collectives 14 %, memory 12.4 to 12.6 GiB

    Every rank makes the same calls. For each line they tell each other three numbers, on the default process group. The
    first three steps are in no line: the second counts operations, and the third is profiled.

    * **tokens/s**: of all replicas together.
    * **MFU**: the operations of a step by what the devices could do meanwhile (Chowdhery et al. 2022, PaLM, appendix
      B): those of products and attention in the forward, three times, so that what is recomputed does not count. What
      is compiled is not seen; pass ``operations``.
    * **collectives**: the share of the profiled step in which this device is in a collective, hidden or not.
    * **memory**: the most since the last line, of the rank with the least and with the most; on CPUs, of the process.

    Args:
        model: a sharded model, or one that is not.
        every: steps for each line.
        peak: operations of one device in a second; found by the device's name if it is known.
        operations: of one step on one rank, where they are not to be counted.
        say: is given each line, on rank 0.

    Attributes:
        numbers: of the last line: ``step_time`` (seconds), ``tokens_per_second``, ``mfu`` and ``collectives`` (1 is
            all), ``memory`` (bytes, of the rank with the most). What is not known is not there.

    Raises:
        ConfigError: ``every`` is no positive number.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        peak: float | None = None,
        operations: float | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        if every < 1:
            raise ConfigError(f"StepMeter(every={every}); wanted a number of steps, such as 10")
        context = context_of(model)
        self._replicas = 1 if context is None else Sizes.of(context.mesh).replicas
        found = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._device = found if context is None else context.device
        self._every, self._say = every, say
        self._peak = peak or _peak_of(self._device)
        self._operations = operations
        self._collectives: float | None = None
        self._done = 0
        self._since, self._tokens, self._steps = 0.0, 0, 0
        self.numbers: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self, tokens: int = 0) -> Iterator[Step]:
        """Surround one step, that of the optimizer included.

        Args:
            tokens: that this replica trains on in it; who learns it later sets it on what is returned. Without them no
                line says a rate.
        """
        step = Step(tokens)
        number = self._done + 1
        if number == _COUNTED and self._operations is None and self._peak is not None:
            with _Operations() as counted:
                yield step
            self._operations = 3.0 * counted.total
        elif number == _PROFILED:
            yield from self._profiled(step)
        else:
            yield step
        self._done = number
        if number <= _PROFILED:
            self.restart()
            return
        self._steps += 1
        self._tokens += step.tokens
        if self._done % self._every == 0:
            self._tell()

    def restart(self) -> None:
        """Leave out of the next line what was up to here: an evaluation, say. What lies between steps is in it else."""
        self._wait()
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).reset_peak_memory_stats(self._device)
        self._since, self._tokens, self._steps = time.perf_counter(), 0, 0

    def _profiled(self, step: Step) -> Iterator[Step]:
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self._wait()
        start = time.perf_counter()
        with profile(activities=kinds) as seen:
            yield step
            self._wait()
        whole = 1e6 * (time.perf_counter() - start)
        self._collectives = min(1.0, covered(collectives_of(seen)) / whole)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)

    def _tell(self) -> None:
        self._wait()
        seconds = (time.perf_counter() - self._since) / self._steps  # at least this one
        ranks = _of_ranks([self._memory(), self._operations or 0.0, self._collectives or 0.0], self._device)
        memory = sorted(rank[0] for rank in ranks)
        rate = self._tokens * self._replicas / (seconds * self._steps)
        operations = sum(rank[1] for rank in ranks) / len(ranks)
        self.numbers = {"step_time": seconds, "memory": memory[-1]}
        self.numbers["collectives"] = sum(rank[2] for rank in ranks) / len(ranks)
        said = [f"{1e3 * seconds:.1f} ms"]
        if rate:
            self.numbers["tokens_per_second"] = rate
            said.append(f"{rate:,.0f} tokens/s")
        if operations and self._peak is not None:
            self.numbers["mfu"] = operations / (seconds * self._peak)
            said.append(f"MFU {100 * self.numbers['mfu']:.0f} %")
        said.append(f"collectives {100 * self.numbers['collectives']:.0f} %")
        least, most = (f"{size / 2**30:.1f}" for size in (memory[0], memory[-1]))
        said.append(f"memory {least if least == most else f'{least} to {most}'} GiB")
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._say(f"step {self._done}: {', '.join(said)}")
        self.restart()

    def _memory(self) -> float:
        if self._device.type != "cpu":
            return float(torch.get_device_module(self._device.type).max_memory_allocated(self._device))
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


class _Operations(TorchDispatchMode):
    """Counts the multiplications and additions of products, convolutions and attention outside of the backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what DTensor does inside is seen
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None and backward_task() == -1:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def _peak_of(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS.items() if known in name), None)


def _of_ranks(numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """Return the numbers of every rank."""
    if not dist.is_initialized():
        return [[*numbers]]
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [rank.tolist() for rank in found]
