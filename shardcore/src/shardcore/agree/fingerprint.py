"""What ranks have to hold alike, as (name, value) pairs of text that are equal in every process if the ranks are.

Left out is what may rightly differ between ranks: paths, devices, ranks and process ids, addresses, metadata of the
files that a model came from, and the private state of modules.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import numbers
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardcore
from shardcore.comm.raw import as_bytes
from shardcore.plan import ShardPlan

#: The name of something, and what it is on this rank.
Item = tuple[str, str]

# Attributes with one of these words in their name say where a model runs, or what it remembers of earlier calls ...
_OF_THE_RANK = frozenset(
    {"cached", "device", "devices", "hash", "main", "master", "node", "pid", "port"}
    | {"process", "rank", "ranks", "time", "timestamp"}
)

# ... and text with one of these, where it came from.
_OF_THE_SOURCE = frozenset(
    {"address", "commit", "dir", "directory", "file", "filename", "folder", "host", "hostname", "path", "url"}
    | {"uuid", "version"}
)

# What is written into a configuration when it is saved; the tensors themselves are compared.
_METADATA = frozenset({"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "_from_model_config"})

_PATH = re.compile(r"^([a-z]+://|~|\.{0,2}/|[A-Za-z]:\\)")
_DEVICE = re.compile(r"^(cpu|cuda|hpu|meta|mps|mtia|npu|xla|xpu)(:\d+)?$")

# Words of 8 bytes are summed in columns, whose number is a prime: what changes places with a neighbour, at a distance
# that is a product of a model's sizes, comes into another column. So many rows are one sum, added by as many as
# the cache of a core holds, which takes half the time.
_WORDS = 4093
_ROWS = 64
_CACHED = 16


def versions(model: nn.Module) -> list[Item]:
    """Return what `libraries` says as what ranks compare."""
    return [(f"the version of {name}", version) for name, version in libraries(model).items()]


def libraries(model: nn.Module) -> dict[str, str]:
    """Return the versions of shardcore, of torch and of the libraries that define the class of ``model``, by name."""
    names = dict.fromkeys(cls.__module__.partition(".")[0] for cls in type(model).__mro__)
    found = {"shardcore": shardcore.__version__, "torch": torch.__version__}
    for library in names:
        if library not in ("builtins", "torch") and (version := _version(library)):
            found[library] = version
    return found


def _version(library: str) -> str:
    # What the imported code says of itself; the metadata of a large distribution take milliseconds to parse.
    if version := getattr(sys.modules.get(library), "__version__", None):
        return str(version)
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def model_items(model: nn.Module) -> Iterator[Item]:
    """Yield the class of every module of ``model``, and every plain attribute that the code of a module may read.

    Plain are numbers, text, enums, dtypes, classes and functions (by name), containers and configurations of those.
    None and other objects are both left out, so that an object on one rank (a logger) is no difference from None.
    """
    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        where = first.setdefault(id(module), path)
        again = "" if where == path else f", the same module as {where}"
        yield f"the class of {path or 'the model'}", _qualified(type(module)) + again
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in sorted(vars(module).items()):
            if name[0] != "_" and name != "training":
                compared = sorted(value) if _of_a_set(module, name, value) else value
                yield from _flat(f"{path}.{name}" if path else name, name, compared, seen)


def _of_a_set(module: nn.Module, name: str, value: Any) -> bool:
    """Tell whether ``value`` lists what the module's configuration has under the same name, each once.

    Such a list is made by ``list(set(config.layer_types))``: its order is that of hashes, and only the configuration's,
    which is compared too, means anything.
    """
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return False  # the configuration is asked for lists alone: what else it has may be computed, and fail
    given = getattr(getattr(module, "config", None), name, None)
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        return False
    return sorted(value) == sorted({*given})


def optimizer_items(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[Item]:
    """Yield the class and the settings of an optimizer, and which parameters, by identity in ``names``, it steps."""
    yield "the class of the optimizer", _qualified(type(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        where = f"optimizer.param_groups.{number}"
        yield f"{where}.params", ", ".join(names[id(parameter)] for parameter in group["params"])
        for name, value in group.items():
            if name != "params":
                yield from _flat(f"{where}.{name}", name, value, set())


def _flat(where: str, name: str, value: Any, seen: set[int]) -> Iterator[Item]:
    """Yield the plain values that ``value`` holds; a configuration that several modules share is yielded once."""
    words = _OF_THE_RANK | _OF_THE_SOURCE if isinstance(value, str) else _OF_THE_RANK
    if value is None or name in _METADATA or not words.isdisjoint(name.lower().split("_")):
        return
    parts: Iterable[tuple[str, str, Any]]
    if isinstance(value, Mapping):
        parts = [(f"{where}.{key}", str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        if (text := _sequence(value)) is not None:
            yield where, text
            return
        parts = [(f"{where}.{index}", "", part) for index, part in enumerate(value)]
    elif _is_configuration(name, value):
        parts = [(f"{where}.{key}", key, part) for key, part in vars(value).items()]
    else:
        if (text := _plain(value)) is not None:
            yield where, text
        return
    if id(value) not in seen:
        seen.add(id(value))
        for place, key, part in sorted(parts, key=lambda part: part[:2]):  # the order of a mapping may differ
            yield from _flat(place, key, part, seen)


def _is_configuration(name: str, value: Any) -> bool:
    if isinstance(value, type | Tensor | nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return False
    named = name.rpartition("_")[-1] in ("config", "cfg", "args", "hparams")
    return named or dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace)


def _sequence(values: Sequence[Any]) -> str | None:
    """Return a sequence of plain values as text, or None if it holds anything else."""
    texts = ["None" if value is None else _plain(value) for value in values]
    return None if None in texts else f"[{', '.join(map(str, texts))}]"


def _plain(value: Any) -> str | None:
    """Return a plain value as text, or None for anything that is not plain or may differ between ranks."""
    match value:
        case enum.Enum():
            return f"{_qualified(type(value))}.{value.name}"
        case bool() | torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case str():
            return None if _PATH.match(value) or _DEVICE.match(value) else repr(value)
        case numbers.Number():
            return repr(value.item() if hasattr(value, "item") else value)
        case Set():
            texts = [_plain(part) for part in value]
            return None if None in texts else f"{{{', '.join(sorted(map(str, texts)))}}}"
        case functools.partial():
            keywords = sorted(value.keywords.items())
            parts = [_plain(part) for part in (value.func, *value.args, *(part for _, part in keywords))]
            return None if None in parts else f"partial({', '.join(map(str, parts))})"
        case type():
            return _qualified(value)
    return _qualified(value) if inspect.isroutine(value) else None


def _qualified(thing: Any) -> str:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", str(type(thing)))
    return f"{module}.{name}" if module else str(name)


def training_modes(model: nn.Module) -> list[Item]:
    """Return the training mode of ``model``, and of the modules in which it is another one."""
    return [
        (f"the training mode of {path}" if path else "the training mode", str(module.training))
        for path, module in model.named_modules()
        if not path or module.training != model.training
    ]


def tensor_items(model: nn.Module, *, values: bool = True) -> tuple[list[Item], list[Item]]:
    """Return what must agree about every parameter and buffer of ``model``, and of what they contain.

    The second list says whether they are on the meta device too; without ``values`` it is empty.
    """
    tensors = [*model.named_parameters(), *sorted(model.named_buffers())]  # a set may have given their order
    about = [
        item
        for name, tensor in tensors
        for item in (
            (f"the shape of {name}", str(tuple(tensor.shape))),
            (f"the dtype of {name}", str(tensor.dtype)),
            (f"requires_grad of {name}", str(tensor.requires_grad)),
        )
    ]
    return about, [(f"the values of {name}", checksum(tensor)) for name, tensor in tensors] if values else []


def in_words(plan: ShardPlan) -> list[Item]:
    """Return every part of a plan, so that ranks with different plans see where they part.

    The words are the same in every process. The digest comes last: it covers what words leave out.
    """
    steps = [(f"step {number} of the plan", step.in_full()) for number, step in enumerate(plan.steps, 1)]
    layouts = [(f"the layout of {p.name} in the plan", f"{p.layout or 'left to a function'}") for p in plan.parameters]
    return [*steps, *layouts, ("the plan", plan.digest)]


def checksum(tensor: Tensor) -> str:
    """Return a checksum of the bits of ``tensor``, which does not depend on its strides; words for a meta tensor.

    At the speed of memory: a CRC takes six times as long. Training checkpoints hold such checksums. Values that change
    places are seen, but at a multiple of 4093 words within 2 MB.
    """
    if tensor.is_meta:
        return "on the meta device"
    if tensor.numel() == 0:
        return "empty"
    raw = as_bytes(tensor.detach().contiguous())
    if raw.storage_offset() % 8:
        raw = raw.clone()
    rows = raw[: raw.numel() // (8 * _WORDS) * (8 * _WORDS)].view(torch.int64).view(-1, _WORDS)
    digest = hashlib.sha256()
    for some in rows.split(_ROWS):
        sums = torch.stack([few.sum(0) for few in some.split(_CACHED)]).sum(0)
        digest.update(sums.cpu().numpy().tobytes())
    digest.update(raw[rows.nbytes :].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
