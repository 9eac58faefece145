"""Which layers of a model a small copy has: at least some, and one of each kind that its configuration lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NUMBERS = r"(num|n)_(hidden_|decoder_|encoder_)?layers?|(en|de)coder_layers|num_blocks|n_block|depth"
#: Numbers of what lies one after the other beside them, or inside of each, which no list describes.
_OTHERS = (
    r"\w+_(en|de)coder_layers|\w+_num_(wavenet_)?layers|\w+_num_flows|num_self_attends_per_block|"
    r"decoder_num_hidden_layers|resampler_depth|[lxr]_layers"
)
#: Larger whole numbers are sizes.
_LARGEST_KIND = 64
#: Values of a list that are more than these are sizes of their own, and no kinds.
_KINDS = 4


class Layers:
    """The layers of a configuration that its small copy has.

    A list with an entry for each layer says of which kind it is; so does a list of the places of some. The copy has a
    layer of each kind, in their order. A configuration with the depths of its stages has no such lists.

    Args:
        fields: of the configuration.
        count: at least so many layers.
        all_places: keep all layers whose places are listed, and not only one.

    Attributes:
        of: how many layers the configuration has; 0 if it does not say.
        count: how many the copy has.
        found: the numbers of layers, and the lists of their kinds, of the copy.
    """

    def __init__(self, fields: Mapping[str, Any], count: int, *, all_places: bool = False) -> None:
        if isinstance(fields.get("depths"), list | tuple):
            fields = {}  # lists are of stages
        numbers = {k: v for k, v in fields.items() if re.fullmatch(_NUMBERS, k) and type(v) is int and v}
        stacks = [len(value or ()) for name, value in fields.items() if re.fullmatch(r"\w+_layers_types", name)]
        self.of = next(iter([*numbers.values(), *stacks]), 0)
        lists = {k: list(v) for k, v in fields.items() if self._is_of_layers(v) and not k.endswith("_size")}
        places = {name: value for name, value in fields.items() if self.of and self._is_of_places(name, value)}
        kinds = [list(map(str, values)) for values in lists.values()]
        kinds += [[str(at in value) for at in range(self.of)] for value in places.values()]
        kept = self._kept([each for each in kinds if len(set(each)) <= _KINDS], min(count, self.of))
        if all_places:
            kept = sorted({*kept, *(at for value in places.values() for at in value)})
        self.found: dict[str, Any] = {}
        if fields.get("num_kv_shared_layers"):  # the last ones, which read keys and values of those of their kinds
            self.found["num_kv_shared_layers"] = len(kept)
            kept = [*kept, *kept]
        self.count = len(kept)
        self.found |= {name: min(value, max(count, self.count)) for name, value in numbers.items()}
        others = {k: v for k, v in fields.items() if re.fullmatch(_OTHERS, k) and type(v) is int and v}
        self.found |= {name: min(value, count) for name, value in others.items()}
        self.found |= {name: [values[at] for at in kept] for name, values in lists.items()}
        parts = [name for name, value in fields.items() if re.fullmatch(r"n_\w+_layers", name) and type(value) is int]
        if len(parts) > 1 and sum(fields[name] for name in parts) == self.of:  # of which all layers are made up
            self.found |= dict.fromkeys(parts, 1) | {parts[0]: self.count - len(parts) + 1}
        for name, value in places.items():
            self.found[name] = [place for place, at in enumerate(kept) if at in value]

    def _is_of_layers(self, value: Any) -> bool:
        """Tell whether a value lists kinds: numbers for each layer may be sizes, which the copy has its own of."""
        if not isinstance(value, list | tuple) or len(value) != self.of or self.of < 2:
            return False
        sizes = all(type(each) is int and each > _LARGEST_KIND for each in value)
        return not sizes and all(isinstance(each, str | int | float | bool | None) for each in value)

    def _is_of_places(self, name: str, value: Any) -> bool:
        if not isinstance(value, list | tuple) or not re.search(r"ind(ex|ic)|layers|layer_ids", name) or not value:
            return False
        return len(value) < self.of and all(type(v) is int and 0 <= v < self.of for v in value)

    def _kept(self, kinds: list[list[str]], count: int) -> list[int]:
        kept = [0] if kinds and self.of else list(range(count))
        for values in kinds:
            for kind in dict.fromkeys(values):
                if kind not in [values[at] for at in kept]:
                    kept.append(values.index(kind))
        rest = (at for at in range(self.of) if at not in kept)
        kept += [next(rest) for _ in range(count - len(kept))]
        return sorted(kept)
