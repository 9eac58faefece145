"""Where a model can be cut: the parts of ``Stages``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from shardcore_scaffold.facts import LISTS


def lists_of(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Return the outermost lists that hold the modules ``blocks``, in their order in the model."""
    above = {path.rpartition(".")[0] for path in blocks}
    lists = [path for path, module in model.named_modules() if path in above and isinstance(module, LISTS)]
    return [name for name in lists if not any(name.startswith(f"{other}.") for other in (*lists, *blocks))]


def stages_of(model: nn.Module, lists: Collection[str]) -> dict[str, list[str]]:
    """Return the names of each part, in the order of the modules; they hold every parameter and buffer once."""
    if not lists:
        return {}
    found: dict[str, list[str]] = {"first": [], "blocks": [], "between": [], "last": [], "everywhere": []}
    behind: list[str] = []  # what was passed since the last list
    for kind, name in _parts(model, "", lists):
        if kind == "parameters":
            (behind if found["blocks"] else found["first"]).append(name)
            continue
        if kind == "blocks":
            found["between"] += behind
            behind = []
        found[kind].append(name)
    found["last"] = behind
    return {part: names for part, names in found.items() if names}


def _parts(module: nn.Module, path: str, lists: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield ("blocks", "parameters" or "everywhere", name) of what stands in a module, in its order."""
    if path in lists:
        yield "blocks", path
    elif not path or any(name.startswith(f"{path}.") for name in lists):
        yield from (("parameters", f"{path}.{n}".lstrip(".")) for n, p in module._parameters.items() if p is not None)
        yield from (("everywhere", f"{path}.{n}".lstrip(".")) for n, b in module._buffers.items() if b is not None)
        for name, child in module.named_children():
            yield from _parts(child, f"{path}.{name}".lstrip("."), lists)
    elif any(True for _ in module.parameters()):
        yield "parameters", path
    elif any(True for _ in module.buffers()):
        yield "everywhere", path
