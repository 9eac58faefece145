"""A training step under sequence parallelism on a slow link: waited for, as it is, and in pieces beside products.

    python benchmarks/overlap.py --help

One rank of two; the other is not there, and its process group sends nothing. What is sent takes the time that a link of
the given speed would take, one transfer after another, while this rank goes on. The speed is so that all transfers of a
step take as long as ``--link`` says, in parts of the step without a link. Time is that of this process on the CPU, and
of the waits beside it, which nobody sleeps through: other load on the machine counts little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaModel

import shardcore
from shardcore.comm import collectives

RANKS = 2


class Link:
    """When what was sent last is there, and how long it was waited for; each number takes ``of_a_number`` seconds."""

    def __init__(self, of_a_number: float, waits_at_once: bool) -> None:
        self.of_a_number, self.waits_at_once = of_a_number, waits_at_once
        self.free, self.numbers, self.waited = 0.0, 0, 0.0

    def now(self) -> float:
        """Return the time."""
        return time.process_time() + self.waited

    def pending(self) -> type[collectives.Pending]:
        """Return what stands for a collective that is under way."""
        link = self

        class Pending(collectives.Pending):
            def __init__(self, work: Any, result: Any, read: Any) -> None:
                super().__init__(work, result, read)
                # A rank is given what others have of what is gathered, and as much of what is scattered.
                number = read.numel() // (RANKS if read.shape[0] == RANKS else 1)
                link.numbers += number
                link.free = self.end = max(link.now(), link.free) + number * link.of_a_number
                if link.waits_at_once:
                    self.pause()

            def pause(self) -> None:
                link.waited += max(0.0, self.end - link.now())

            def wait(self) -> torch.Tensor:
                self.pause()
                return super().wait()

        return Pending


def timed(step: Callable[[], None], link: Link) -> float:
    """Return how many milliseconds a step takes over ``link``."""
    with mock.patch.object(collectives, "Pending", link.pending()):
        begin = link.now()
        step()
        return (link.now() - begin) * 1e3


def step_of(overlap: bool, hidden: int, rows: int, tokens: int) -> Callable[[], None]:
    """Return a forward and a backward of one rank's share of two blocks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64, use_cache=False)).train()
    options = {"enable_sequence_parallelism": True, "enable_sequence_overlap": overlap}
    model = shardcore.shard(model, tp=RANKS, **options)
    inputs = torch.randn(rows, tokens, hidden, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(inputs_embeds=inputs).last_hidden_state
        out.backward(torch.ones_like(out))

    return step


@click.command(help=str(__doc__).partition("\n")[0])
@click.option("--hidden", default=512, show_default=True, help="Features.")
@click.option("--rows", default=16, show_default=True, help="Of the batch.")
@click.option("--tokens", default=256, show_default=True, help="Of each row.")
@click.option("--link", default=0.67, show_default=True, help="Time of all transfers, in steps without a link.")
@click.option("--rounds", default=7, show_default=True, help="Steps that are timed.")
def main(hidden: int, rows: int, tokens: int, link: float, rounds: int) -> None:
    """Run it."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    plain, pieces = step_of(False, hidden, rows, tokens), step_of(True, hidden, rows, tokens)
    free = Link(0.0, waits_at_once=False)
    timed(pieces, free)
    alone = min(timed(plain, free) for _ in range(3))
    free.numbers = 0
    timed(plain, free)
    slow = link * alone / 1e3 / free.numbers
    ways = {"no link": (plain, 0.0, False), "pieces, no link": (pieces, 0.0, False)}
    ways |= {"waited for": (plain, slow, True), "as it is": (plain, slow, False), "in pieces": (pieces, slow, False)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (step, of_a_number, at_once) in ways.items():
            found[name].append(timed(step, Link(of_a_number, at_once)))
    table = Table("step", "ms", "of waited for")
    waited = statistics.median(found["waited for"])
    for name, times in found.items():
        table.add_row(name, f"{statistics.median(times):.0f}", f"{statistics.median(times) / waited:.2f}")
    Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
