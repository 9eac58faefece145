"""Where the steps of a training script go: a profile with the names of the model's parts, and a table.

Sources: `torch.profiler`, whose ranges these are; steps are those of the first optimizer that makes one.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

#: What profiles call collectives: the kernels of NCCL and RCCL, and the calls of gloo.
COLLECTIVES = ("nccl", "gloo:")
_OPTIMIZER = "Optimizer.step#"
_MARK = "forward of "


@dataclass(frozen=True)
class Row:
    """One line of the table: ``calls`` and ``milliseconds`` in a step."""

    where: str
    calls: float
    milliseconds: float


class _EndError(SystemExit):
    """Ends the script when its steps have been profiled."""


def run(
    script: Path, arguments: Sequence[str], *, skip: int, steps: int, out: Path, say: Callable[[str], None]
) -> bool:
    """Run ``script`` as ``python script *arguments`` does, and end it when its steps have been profiled.

    Every rank writes ``out/rankN.json`` for chrome://tracing or Perfetto; rank 0 says the table.

    Args:
        script: a training.
        arguments: of its command line.
        skip: steps before those that are profiled.
        steps: how many are profiled.
        out: a folder, which is made.
        say: is given each line.

    Returns:
        whether the steps were profiled; False where the script ended before.
    """
    profiler = _Profiler(skip, steps, out, say)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with profiler.hooks():
            runpy.run_path(str(script), run_name="__main__")
    except _EndError:
        return True
    except BaseException:
        profiler.end()
        raise
    if profiler.end():
        return True
    say(f"{script} ended after {profiler.done} steps; {skip} + {steps} were wanted: nothing was profiled")
    return False


class _Profiler:
    def __init__(self, skip: int, steps: int, out: Path, say: Callable[[str], None]) -> None:
        self.done = 0
        self._skip, self._steps, self._out, self._say = skip, steps, out, say
        self._first: Optimizer | None = None
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._models: WeakSet[nn.Module] = WeakSet()
        #: Of the calls of modules that are running, outermost first; None where one has no name.
        self._open: list[record_function | None] = []
        self._profile: Any = None
        self._begin = 0.0
        #: What is done before the next call of a model.
        self._due: Callable[[], None] | None = None

    def hooks(self) -> contextlib.ExitStack:
        """Follow all modules and optimizers of the process, as long as the context is open."""
        stack = contextlib.ExitStack()
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_post_hook(self._stepped),
        ):
            stack.callback(handle.remove)
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._open and self._due is not None:
            due, self._due = self._due, None
            due()
        if self._profile is None:
            return
        if not self._open and module not in self._models:  # a model, or a stage of one
            self._models.add(module)
            self._names.update(_parts(module))
        name = self._names.get(module)
        opened = None if name is None else record_function(_MARK + name)
        if opened is not None:
            opened.__enter__()
        self._open.append(opened)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._open and (opened := self._open.pop()) is not None:
            opened.__exit__(None, None, None)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        self.done += 1
        # Not at once: torch's own range around the step of an optimizer is open here.
        if self.done == self._skip:
            self._due = self._start
        elif self.done == self._skip + self._steps:
            self._due = self._stop

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        _wait()
        self._profile = profile(activities=kinds)
        self._profile.__enter__()
        self._begin = time.perf_counter()

    def _stop(self) -> None:
        _wait()
        seconds = time.perf_counter() - self._begin
        self._profile.__exit__(None, None, None)
        self._write(seconds)
        raise _EndError(0)

    def end(self) -> bool:
        """Tell whether the script has ended with the last of the steps, and write them; a profile is closed."""
        if self._due != self._stop:
            if self._profile is not None:  # torch crashes as the process ends if one is left open
                self._profile.__exit__(None, None, None)
            return False
        with contextlib.suppress(_EndError):
            self._stop()
        return True

    def _write(self, seconds: float) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._out.mkdir(parents=True, exist_ok=True)
        file = self._out / f"rank{rank}.json"
        self._profile.export_chrome_trace(str(file))
        if rank == 0:
            for line in table(rows(self._profile, self._steps), 1e3 * seconds / self._steps):
                self._say(line)
            self._say(f"{file}: for chrome://tracing or https://ui.perfetto.dev, as that of each other rank")


def _parts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield what a block is made of, under one name for all blocks, and what stands around the blocks."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for path, module in model.named_modules():
        parts = path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit() and ".".join(parts[:i]) in lists), None)
        below = None if at is None else parts[at + 1 :]
        holds = any(inner.startswith(f"{path}.") for inner in lists) or path in lists
        around = at is None and bool(path) and not holds and (len(parts) == 1 or _above_blocks(parts, lists))
        if (around or (below is not None and len(below) == 1)) and any(True for _ in module.parameters()):
            yield module, ".".join("*" if part.isdigit() else part for part in parts)


def _above_blocks(parts: Sequence[str], lists: Sequence[str]) -> bool:
    """Tell whether a list of blocks lies beside the module."""
    beside = ".".join(parts[:-1])
    return any(path.rpartition(".")[0] == beside for path in lists)


def rows(profiled: Any, steps: int) -> list[Row]:
    """Return where a step went: parts of the model in the forward, the optimizer, and collectives."""
    on_device = torch.cuda.is_available()
    found = []
    for event in profiled.key_averages():
        if event.key.startswith((_MARK, _OPTIMIZER)):
            where = event.key.removeprefix(_MARK).removeprefix(_OPTIMIZER)
            spent = event.device_time_total if on_device else event.cpu_time_total
            found.append(Row(where, event.count / steps, spent / steps / 1e3))
    found.sort(key=lambda row: -row.milliseconds)
    spans = collectives_of(profiled)
    return [*found, Row("collectives", len(spans) / steps, covered(spans) / steps / 1e3)]


def table(found: Sequence[Row], milliseconds: float) -> list[str]:
    """Return the lines of the table, at most 80 columns wide; ``milliseconds`` are those of a step."""
    lines = [f"{'in a step of ' + format(milliseconds, '.1f') + ' ms':<48}{'calls':>8}{'ms':>12}{'share':>8}"]
    for row in found:
        where = row.where if len(row.where) <= 47 else f"...{row.where[-44:]}"
        share = 100 * row.milliseconds / milliseconds
        lines.append(f"{where:<48}{row.calls:>8.0f}{row.milliseconds:>12.2f}{share:>7.0f}%")
    return [*lines, "Parts of the model: their forward alone. Collectives may overlap with others."]


def collectives_of(profiled: Any) -> list[tuple[float, float]]:
    """Return when each collective of a profile began and ended, in microseconds."""
    events = profiled.events() or ()
    return [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(COLLECTIVES)]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
