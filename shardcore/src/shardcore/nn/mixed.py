"""Naming the parameter when torch refuses to compute with a plain tensor and a DTensor.

A module that reads a parameter of another one (``self.embed.weight``) is given the local tensor where every rank's is
the whole parameter, or that of its heads (`shardcore.nn.replicated`). A split linear or embedding keeps its DTensor:
what its part means is known to its own forward alone. torch's message names neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import spec_of
from shardcore.comm.parts import split_dim
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext, nearest_context

__all__ = ["explained"]

_MIXED = "got mixed torch.Tensor and DTensor"
_SIZES = re.compile(r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_UNFORMATTED = "unsupported format string passed to DTensor.__format__"


def explained(model: nn.Module, error: RuntimeError | TypeError) -> NotSupportedError | None:
    """Return an error that names the parameters and their reader, or None if ``error`` is another one.

    A hook that formats a number of a parameter is told of in the same way.

    Args:
        model: the sharded model, in whose forward the error was raised.
        error: with its traceback.
    """
    if _UNFORMATTED in str(error):
        return NotSupportedError(
            f"within a call of this sharded {type(model).__name__}, a hook or its code formats a number of a "
            "parameter, such as f'{p.abs().max():.2e}', which is a DTensor and has no format: take p.full_tensor() "
            "first, on all ranks. DebugUnderflowOverflow (debug='underflow_overflow' of the Trainer) does so with "
            "every parameter: use it on the unsharded model, or hooks of your own on the outputs of modules"
        )
    if (sizes := _SIZES.search(str(error))) is not None:
        _note_parts(error, int(sizes[1]), int(sizes[2]), nearest_context(model))
    if _MIXED not in str(error):
        return None
    modules = {id(module): path for path, module in model.named_modules()}
    frames = list(_frames(error))
    readers = [frame for frame in frames if id(_self(frame)) in modules]
    if not readers:
        return None
    reader = _self(readers[-1])
    found = ", ".join(_used(model, frames)) or ", ".join(_read(reader, modules, readers[-1].f_code))
    path = modules[id(reader)] or "the model itself"
    line = f"{readers[-1].f_code.co_filename.rpartition('/')[2]}:{_line(error, readers[-1])}"
    return NotSupportedError(
        f"{type(reader).__name__} ({path}, {line}) computes with a parameter that is a DTensor: "
        f"{found or 'one of those below it'}. Its forward reads it, not the forward of the module that holds it, where "
        "a split parameter is used as a part. Say replicate() for the module that holds it, or by_heads() if what "
        f"{type(reader).__name__} computes with it belongs to local heads. torch said: {error}"
    )


def _note_parts(error: BaseException, a: int, b: int, context: ShardContext | None) -> None:
    """Add to an error of torch about sizes that one of them may be that of one rank's part."""
    if context is not None and context.size > 1 and max(a, b) == context.size * min(a, b):
        error.add_note(
            f"This model is sharded over {context.size} ranks, and between column and row linears each has its part of "
            f"heads and features: {min(a, b)} of {max(a, b)}, if it is that. A mask with a row for each head, or a "
            "vector over all features in a hook there, would have to be cut: give this rank's part of it."
        )


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _line(error: BaseException, frame: FrameType) -> int:
    trace, line = error.__traceback__, frame.f_lineno
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame is frame else line
        trace = trace.tb_next
    return line


def _self(frame: FrameType) -> Any:
    return frame.f_locals.get("self")


def _used(model: nn.Module, frames: list[FrameType]) -> list[str]:
    """Return the parameters that the innermost functions were given, as far as they are there unchanged."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for frame in reversed(frames):
        values = list(frame.f_locals.values())
        values += [item for value in values if isinstance(value, tuple) for item in value]
        if found := [_described(names[id(v)], v) for v in values if isinstance(v, DTensor) and id(v) in names]:
            return list(dict.fromkeys(found))
    return []


def _read(reader: nn.Module, paths: dict[int, str], code: CodeType) -> list[str]:
    """Return the split parameters below ``reader`` whose own names, and modules' names, its code has."""
    found = []
    for below, module in reader.named_modules():
        owner = below.rstrip("0123456789.").rpartition(".")[2]
        for name, parameter in module._parameters.items():
            if below and isinstance(parameter, DTensor) and {owner, name} <= set(code.co_names):
                path = ".".join(filter(None, (paths[id(module)], name)))
                found.append(_described(path, parameter))
    return found


def _described(name: str, parameter: DTensor) -> str:
    dim = split_dim(spec_of(parameter).placements[-1])
    return f"{name} {tuple(parameter.shape)}, {'replicated' if dim is None else f'split on dim {dim}'}"
