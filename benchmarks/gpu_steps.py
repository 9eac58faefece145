"""The calls that ``gpu.py`` times: training, prefill, decoding, and a step of the optimizer."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_models import Family
from torch import nn
from transformers import StaticCache
from transformers.modeling_outputs import BaseModelOutput

__all__ = ["Clock", "calls_of", "graph_calls", "optimizer_calls"]

_WARM = {"cuda": 3, "cpu": 1}  # calls before those that are timed

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times calls on one device, ``rounds`` times each."""

    device: str
    rounds: int

    @property
    def calls(self) -> int:
        """How often a call is made, all in all."""
        return self.rounds + _WARM[self.device]

    def time(self, call: Call) -> tuple[float, float, float]:
        """Return the median and the smallest milliseconds, and the peak of memory above the start, in MiB."""
        on_card = self.device == "cuda"
        wait: Call = torch.cuda.synchronize if on_card else lambda: None
        for _ in range(_WARM[self.device]):
            call()
        wait()
        if on_card:
            gc.collect()
        start = torch.cuda.memory_allocated() if on_card else 0
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        found = []
        for _ in range(self.rounds):
            begin = time.perf_counter()
            call()
            wait()
            found.append((time.perf_counter() - begin) * 1e3)
        peak = (torch.cuda.max_memory_allocated() - start) / 2**20 if on_card else 0.0
        return statistics.median(found), min(found), peak


def calls_of(
    family: Family, model: Any, tokens: tuple[int, ...], clock: Clock
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield what is measured of a model, and what makes the call that is timed.

    Args:
        family: what the model is.
        model: one rank's share of it.
        tokens: numbers of tokens; an image has its own.
        clock: how often each call is made, and where.
    """
    for length in family.lengths(tokens):
        said = f"{length} tokens" if length else "an image"
        yield f"training, {said}", partial(_training, family, model, length, clock.device)
        yield f"prefill, {said}", partial(_prefill, family, model, length, clock.device)
    if family.inputs == "sound":
        yield "decoding", partial(_decoding_of_sound, family, model, clock.device)
    if family.causal:
        after = max(tokens)
        yield f"decoding after {after} tokens", partial(_decoding, family, model, after, clock)


def graph_calls(
    family: Family, model: Any, tokens: tuple[int, ...], clock: Clock
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield decoding with CUDA graphs."""
    after = max(tokens)
    yield f"decoding after {after} tokens, CUDA graphs", partial(_decoding, family, model, after, clock, graphs=True)


def optimizer_calls(family: Family, model: nn.Module, device: str) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield the two kinds of AdamW, after a step has left gradients."""
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")

    def step(way: str) -> Call:
        _training(family, model, 8, device)()
        return torch.optim.AdamW(model.parameters(), lr=1e-5, **{way: True}).step  # type: ignore[arg-type]

    for way in ("foreach", "fused"):
        yield f"AdamW, {way}, {kind}", partial(step, way)


def _training(family: Family, model: Any, tokens: int, device: str) -> Call:
    """Return a forward and a backward."""
    given = family.arguments(model, tokens, device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(**given).last_hidden_state
        out.backward(torch.ones_like(out))

    return step


def _prefill(family: Family, model: Any, tokens: int, device: str) -> Call:
    """Return an inference over all tokens."""
    return _without_gradients(model, family.arguments(model, tokens, device))


def _decoding_of_sound(family: Family, model: Any, device: str) -> Call:
    """Return an inference with one token of the decoder, beside a recording that is encoded already."""
    given: dict[str, Any] = family.arguments(model, 1, device)
    with torch.no_grad():
        sound = model.get_encoder()(given.pop("input_features")).last_hidden_state
    return _without_gradients(model, {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=sound)})


def _decoding(family: Family, model: Any, after: int, clock: Clock, *, graphs: bool = False) -> Call:
    """Return an inference with one token, behind ``after`` others in a static cache: each call fills one place more."""
    cache = StaticCache(config=model.config, max_cache_len=after + clock.calls)
    given = {"past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        model(**family.arguments(model, after, clock.device), **given)
    one = {**family.arguments(model, 1, clock.device), **given}
    called = torch.compile(model, mode="reduce-overhead", dynamic=False) if graphs else model
    return _without_gradients(called, one)


def _without_gradients(model: Any, given: dict[str, Any]) -> Call:
    def call() -> None:
        with torch.no_grad():
            model(**given)

    return call
