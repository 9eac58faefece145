"""How a configuration is made small: by the names of its sizes, or else by dividing all of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Sizes of a small model. No two kinds of sizes are equal, where they can be told apart: what is read must say which of
#: them it is. There are more than two heads to a key/value head: a gate beside the queries is no key and value.
SIZES = {"words": 97, "heads": 6, "kv heads": 2, "width": 48, "inner": 44, "head": 8}

#: Where sizes are divided: which, which are numbers of which few do, sides of images; below which size they stay, and
#: the largest side.
_DIVIDED = (
    r"\w*(hidden_size|channels?|filters|_dims?|_width|_widths|_rank|_features|_sizes|(model|hidden|intermediate|ffn)_size|"
    r"d_model|n_embd|n_inner|groups)\w*|dims?|d_\w+|\w+_ffn_dim|ffn_dim|codebook_size|dim_feedforward|(mask_)?feature_size"
)
_FEW = (
    (r"(num|n|moe_num)_(local_|routed_|moe_)?experts|(\w+_)?num_queries|two_stage_num_proposals|latent_query_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|zero_expert_num|top_k_experts|n_group|num_expert_group", 2),
    (r"max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len(gth)?", 1024),
    (r"sliding_window_size|rel_extent", 13),
)
_SIDES = r"image_size|img_size"
_SMALLEST, _SIDE = 16, 64
_GROUPED = 32  # as many groups some norms have, whatever the configuration says


@dataclass(frozen=True)
class Way:
    """A way to make a configuration small.

    Attributes:
        sizes: those that are not the usual ones.
        kept: fields that stay as they are.
        apart: widths differ where they do in the configuration.
        unset: sizes that are None get a value, and so does the token that pads.
        divided: by how much all sizes are divided, whatever their names; numbers of heads stay. 0: it is another way.
    """

    sizes: Mapping[str, int]
    kept: tuple[str, ...] = ()
    apart: bool = False
    unset: bool = False
    divided: int = 0


def ways(sizes: Mapping[str, int], config: Any) -> Iterator[Way]:
    """Yield the ways in the order in which they are tried.

    With fewer key/value heads than heads if the class has them, and widths that differ where they do in the
    configuration; sizes without a default get one where the class wants it; those that may not be small stay. At last
    all are so many times smaller: what must be equal, or a sum of others, stays so.
    """
    usual, even = {**SIZES, **sizes}, {**SIZES, "heads": 4, "width": 32, **sizes}
    yield Way(usual, apart=True)
    for way in (usual, even):
        alike = {**way, "kv heads": way["heads"]}
        yield Way(way)
        yield Way(alike, apart=True)
        yield Way(alike)
        yield Way(way, unset=True)
        yield Way(alike, ("head_dim",))
    yield Way(alike, ("hidden_size", "d_model"))
    yield Way({**alike, "image": 64})
    yield Way(alike, ("image_size", "patch_size"))
    most = 1 if (widest := _widest(config)) else 8
    while widest > 1.5 * most * usual["width"]:
        most *= 2
    for many in dict.fromkeys((most, max(most // 2, 1), max(most // 4, 1), 2 * most, 1)):
        yield Way(usual, divided=many)


def _widest(config: Any) -> int:
    """Return the largest width of blocks that a configuration or one of its parts has."""
    own = [size for name in ("hidden_size", "d_model", "n_embd") if type(size := vars(config).get(name)) is int]
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict") and hasattr(part, "model_type")]
    return max([*own, *map(_widest, parts)], default=0)


def divided(name: str, value: Any, way: Way) -> Any:
    """Return a size as one that is so many times smaller, each of a list too; numbers as few as elsewhere."""
    if isinstance(value, list | tuple):
        return [divided(name, each, way) for each in value] if name != "depths" else [min(each, 2) for each in value]
    if isinstance(value, dict):
        return {key: divided(str(key), each, way) for key, each in value.items()}
    if type(value) is not int or not value:
        return copy.deepcopy(value)
    if re.fullmatch(_SIDES, name):
        return min(value, way.sizes.get("image", _SIDE))
    if "vocab" in name:
        return min(value, way.sizes["words"])
    if few := next((few for pattern, few in _FEW if re.fullmatch(pattern, name)), None):
        return min(value, few)
    if value < _SMALLEST or not re.fullmatch(_DIVIDED, name):
        return value
    return max(value // way.divided, _GROUPED if name == "base_channels" else 1)


def outputs_of(config: Any) -> dict[str, Any]:
    """Return of which layers a small backbone gives outputs: as many as ``config`` says."""
    outs = getattr(config, "out_indices", None)
    if not isinstance(outs, list | tuple) or len(outs) < 2:
        return {}
    return {"out_indices": list(outs if hasattr(config, "depths") else range(1, len(outs) + 1))}
