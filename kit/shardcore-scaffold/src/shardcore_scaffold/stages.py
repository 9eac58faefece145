"""Where a model can be cut: the parts of ``Stages``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from shardcore_scaffold.facts import LISTS


def lists_of(model: nn.Module, blocks: Collection[str]) -> list[str]:
    """Return the outermost lists that hold the modules ``blocks``, in their order in the model.

    A list of unlike modules in each entry of another list (T5's attentions and MLP) is what its block is made of.
    """
    above = {_whole_blocks(model, path.rpartition(".")[0]) for path in blocks}
    lists = [path for path, module in model.named_modules() if path in above and isinstance(module, LISTS)]
    return [name for name in lists if not any(name.startswith(f"{other}.") for other in (*lists, *blocks))]


def _whole_blocks(model: nn.Module, path: str) -> str:
    """Return the list around the list at ``path`` of whose entries it is a part, else ``path``.

    That are entries that are recomputed as a whole, and those that are alike where what is in each of them is unlike.
    """
    entry = path.rpartition(".")[0]
    inside = [type(each) for each in model.get_submodule(path).children()]
    while entry:
        outer = entry.rpartition(".")[0]
        entries = model.get_submodule(outer)
        if isinstance(entries, LISTS):
            alike = len({type(each) for each in entries}) == 1 < len(set(inside))
            if alike or hasattr(type(model.get_submodule(entry)), "gradient_checkpointing"):
                return outer
        entry = outer
    return path


def stacks(model: nn.Module) -> list[str]:
    """Return the outermost lists of several modules of one class of a library: blocks, in which nothing is split."""
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, LISTS) and len(kinds := [type(each) for each in module]) > 1 == len(set(kinds))
        if not kinds[0].__module__.startswith("torch.")
    ]
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


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
