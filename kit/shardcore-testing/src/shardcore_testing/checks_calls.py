"""Checks of calls that other sections do not make: one row at a time, several backwards, parts called by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.errors import ShardcoreError
from shardcore_testing.findings import Ledger
from shardcore_testing.parity import gradient_errors, shared_gradients, whole
from shardcore_testing.subject import Subject, flat
from shardcore_testing.tiny_models import weighted_mean

_BACKWARDS = 3


def one_row(s: Subject, ledger: Ledger) -> None:
    """A batch of one row, backwards three times: gradients add up, none in the storage of another; then clipped.

    In a batch of one row gradients that are sums over rows need no sum, and may be the very tensor of another one's.
    """
    with ledger.check("one row"):
        reference, model = s.twins()
        try:
            rows = _rows(s, reference)
        except (ValueError, RuntimeError) as error:  # of a norm over rows, or of rows of several lines
            ledger.closed(f"the unsharded model cannot be trained with one row: {error}")
            return
        for time in range(_BACKWARDS):
            with ledger.place(f"backward {time}"):
                wanted, got = (s.loss(m(**rows)) for m in (reference, model))
                ledger.close("loss", wanted, got)
                for loss in (wanted, got):
                    loss.backward()
                ledger.errors(gradient_errors(reference, model))
        for first, second in shared_gradients(model):
            ledger.failed(f"the gradients of {first} and {second} share storage: what adds to one adds to both")
        with ledger.place("scaled in place"):
            for m in (reference, model):
                for parameter in m.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            ledger.errors(gradient_errors(reference, model))


def _rows(s: Subject, model: Any) -> dict[str, Any]:
    """Return the first row of a batch that has a loss and a gradient.

    Raises:
        AssertionError: none has; every label of a row may be left out in some batches, not in all.
    """
    for seed in range(3):
        batch = s.inputs(model, seed)
        count = next((t.size(0) for _, t in flat(batch) if t.ndim), 0)
        for row in range(count):
            rows: dict[str, Any] = _narrow(batch, row, count)
            with torch.no_grad():
                if s.loss(model(**rows)).isfinite():
                    return rows
    raise AssertionError(
        "no row of inputs() has a finite loss by itself; the first dim of every tensor has to be the batch"
    )


def _narrow(value: Any, row: int, count: int) -> Any:
    if isinstance(value, Tensor):
        each, rest = divmod(value.size(0), count) if value.ndim else (0, 0)
        # Patches of images, and labels of those that are masked, are flat: those of one row follow those of the other.
        takes = not rest and (each == 1 or (value.ndim <= 2 and each > 0))
        return value[row * each : (row + 1) * each] if takes else value
    if isinstance(value, Mapping):
        return {name: _narrow(inner, row, count) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_narrow(inner, row, count) for inner in value)
    return value


def parts(s: Subject, ledger: Ledger) -> None:
    """What is called by itself, not through the whole model, is right, or refused by an error of shardcore."""
    with ledger.check("parts"):
        names = list(part_names(s, s.build()))
        if not names:
            ledger.closed("the model has no base model, encoder or features of its own, and the case names no parts")
        for name in names:
            with ledger.place(name):
                _part(s, ledger, name)


def part_names(s: Subject, model: Any) -> Iterator[str]:
    """Yield the parts that are called by themselves: the base model, its encoder, its features, what the case names."""
    found = dict.fromkeys(s.case.parts)
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    modules = {id(module): name for name, module in model.named_modules() if name}
    inner = [base] if isinstance(base, nn.Module) else []
    for getter in ("get_encoder", "get_decoder"):
        try:
            inner.append(getattr(model, getter)())
        except (AttributeError, NotImplementedError, TypeError):
            continue
    found |= dict.fromkeys(modules[id(module)] for module in inner if id(module) in modules)
    if hasattr(model, "forward_features"):
        found["forward_features"] = None
    yield from found


def _part(s: Subject, ledger: Ledger, name: str) -> None:
    reference, model = s.twins()
    call = _call(s, reference, name)
    if call is None:
        ledger.true(name not in s.case.parts, "the whole model does not call it; correct the case's parts=")
        return
    # A part may write into what it is given.
    (args, kwargs), (own_args, own_kwargs) = call, _copied(call)
    wanted = list(flat(_callable(reference, name)(*args, **kwargs)))
    try:
        got = list(flat(_callable(model, name)(*own_args, **own_kwargs)))
    except ShardcoreError:
        return  # refused in words; any other exception is a failure
    ledger.true([n for n, _ in wanted] == [n for n, _ in got], f"returned were {[n for n, _ in got]}")
    for (label, tensor), (_, other) in zip(wanted, got, strict=False):
        ledger.close(label, tensor, other)
    for outputs in (wanted, got):
        weighted_mean(*(whole(t) for _, t in outputs if t.requires_grad)).backward()
    ledger.errors(gradient_errors(reference, model))


def _callable(model: Any, name: str) -> Any:
    return getattr(model, name) if hasattr(type(model), name) else model.get_submodule(name)


def _call(s: Subject, reference: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with which the whole model calls a part; a method gets what the model itself gets."""
    inputs = s.inputs(reference)
    if hasattr(type(reference), name):
        return (), inputs
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_copied((args, kwargs)))

    handle = reference.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        reference(**inputs)
    handle.remove()
    return seen[0] if seen else None


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(_copied(inner) for inner in value)
    return {name: _copied(inner) for name, inner in value.items()} if type(value) is dict else value
