"""Equal blocks of a model: a few of each kind stand for all of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

#: So many blocks of a kind have a first, a last, and one between, in which others are gathered before and behind it:
#: one more adds what every further one adds.
LEAST = 3

_NUMBER = re.compile(r"(layer|block)s?_?(id|idx|index|number|no)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Blocks of one list that are built alike.

    Attributes:
        blocks: the name of the list.
        indices: of the blocks, in order.
    """

    blocks: str
    indices: tuple[int, ...]

    @property
    def left_out(self) -> int:
        """How many blocks `LEAST` of them stand for besides themselves."""
        return max(0, len(self.indices) - LEAST)


def kinds_of(model: nn.Module, lists: Iterable[str], recomputed: Collection[str] = ()) -> list[Kind]:
    """Return the kinds of blocks in the named lists, in the order of their first ones.

    Alike are blocks with the same modules, settings and parameters; of probabilities and other fractions only whether
    they are zero matters. Blocks whose names are in ``recomputed`` are of another kind than those that are not.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for name in lists:
        for index, block in enumerate(model.get_submodule(name).children()):
            key = name, f"{name}.{index}" in recomputed, *_description(block)
            found.setdefault(key, []).append(index)
    return [Kind(blocks=str(key[0]), indices=tuple(indices)) for key, indices in found.items()]


def _description(block: nn.Module) -> tuple[str, ...]:
    lines = []
    for path, module in block.named_modules():
        own = {name: _plain(value) for name, value in vars(module).items() if not _NUMBER.search(name)}
        held = [(name, None if p is None else (p.shape, p.dtype, p.requires_grad)) for name, p in _parameters(module)]
        lines.append(f"{path} {type(module)} {sorted((k, v) for k, v in own.items() if v is not None)} {held}")
    return tuple(lines)


def _parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter | None]]:
    return module._parameters.items()


def _plain(value: Any) -> str | None:
    if isinstance(value, float):
        return f"fraction {value == 0}"
    if isinstance(value, bool | int | str | type):
        return str(value)
    if isinstance(value, tuple | list) and all(isinstance(part, bool | int | str) for part in value):
        return str(value)
    return None


def kept(kinds: Sequence[Kind], more: Kind | None = None, only: Collection[Kind] | None = None) -> dict[str, list[int]]:
    """Return, by list, the indices of the blocks that stand for all: of each kind the first one and the last two.

    Of the kind ``more``, the second one too. So the ends of different kinds keep their order. Of kinds that are not
    among ``only``, if that is given, the first one alone.
    """
    found: dict[str, list[int]] = {}
    for kind in kinds:
        first = 2 if kind is more else 1
        few = kind.indices[:first] + kind.indices[1 - LEAST :] if kind.left_out else kind.indices
        if only is not None and kind not in only:
            few = kind.indices[:1]
        found.setdefault(kind.blocks, []).extend(few)
    return {name: sorted(indices) for name, indices in found.items()}


def label(kinds: Sequence[Kind], name: str, index: int, indices: Collection[int]) -> str:
    """Return what the place of a kept block is called: its kind, and whether it is the first or last kept of it.

    "First" is the first block of its list alone, behind whose backward the blocks are left. Where kinds take turns, the
    one that was added comes long before the others that are between, and has a place of its own: what one more adds is
    seen at the places of those that are always kept.
    """
    number, kind = next((n, k) for n, k in enumerate(kinds) if k.blocks == name and index in k.indices)
    same = [i for i in kind.indices if i in indices]
    if index == same[0]:
        position = "first" if index == min(indices) else "foremost"
    elif len(same) > LEAST and index == same[1] and sum(k.blocks == name for k in kinds) > 1:
        position = "added"
    else:
        position = "last" if index == same[-1] else "between"
    return f"{name}, kind {number}, {position}"


def truncated(model: nn.Module, keep: dict[str, list[int]]) -> Any:
    """Return a copy of ``model`` with the blocks in ``keep`` alone; nothing of the others is copied."""
    memo: dict[int, Any] = {}
    for name, indices in keep.items():
        blocks = model.get_submodule(name)
        few = copy.copy(blocks)
        # Its hooks are its own, or what is done to the copy would be done to the model.
        few.__dict__.update({key: copy.copy(own) for key, own in vars(blocks).items() if isinstance(own, dict)})
        held = list(blocks._modules.values())
        few.__dict__["_modules"] = {str(n): copy.deepcopy(held[i], memo) for n, i in enumerate(indices)}
        memo[id(blocks)] = few
    return copy.deepcopy(model, memo)
