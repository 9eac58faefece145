"""Sizes of a small model that follow from others: multiples of widths, heads of state spaces, what turns of a head."""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

#: Heads of a state space, and what they times their size come to: the width times the number of ``expand``.
_STATES = (
    ("num_heads", "head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
)
#: Widths that are larger are no accidental factors of other sizes, which may be so many times the width.
_NO_WIDTH, _TIMES = 64, 4


def following(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes that follow from others.

    Those are multiples of the width, heads of state spaces, and what turns by positions of a head.
    """
    more: dict[str, Any] = {}
    whole = {name: value for name, value in given.items() if type(value) is int and value}
    width = whole.get("hidden_size", 0)
    for name, value in whole.items() if width > _NO_WIDTH else ():
        named = re.fullmatch(r"\w+_(size|dim|width|channels)", name)
        if named and found.get(name) == value and value % width == 0 and value // width <= _TIMES:
            more[name] = value // width * found["hidden_size"]
    for heads, size, expand in _STATES:
        if whole.keys() >= {heads, size, expand} and whole[heads] * whole[size] == whole[expand] * width:
            more[heads] = found[expand] * found["hidden_size"] // found[size]
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    if whole.keys() >= {"qk_head_dim", *parts} and whole["qk_head_dim"] == sum(whole[part] for part in parts):
        more["qk_head_dim"] = sum(found[part] for part in parts)
    if whole.keys() >= {"image_size", "patch_size", "output_stride"}:  # several patches to a side, also at the end
        more["image_size"] = 2 * found["patch_size"] * found["output_stride"]
    for name, part, numbers in (
        ("image_grid_pinpoints", "vision_config", ("image_size",)),  # pictures of several images
        ("backbone_feature_sizes", "backbone_config", ("image_size", "patch_size")),
    ):
        own, small = (_number(config.get(part), *numbers) for config in (given, found))
        if own and small and given.get(name):
            more[name] = [[n * small // own for n in pair] for pair in given[name]]
    if images := [name for name, part in given.items() if _number(part, "image_size") == whole.get("patch_size", 0)]:
        more["patch_size"] = found[images[0]]["image_size"]  # each patch is an image of a part
    if "mamba_d_ssm" in whole:
        more["mamba_d_ssm"] = found["mamba_n_heads"] * found["mamba_d_head"]
    if "head_dim" in whole and whole["head_dim"] == whole.get("qk_rope_head_dim"):
        more["head_dim"] = found["qk_rope_head_dim"]  # the part of latent heads that turns
    own = whole.get("head_dim") or width // whole.get("num_attention_heads", width + 1)
    if own:
        small = more.get("head_dim") or found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(given.get(name), Mapping):
                more[name] = {key: _turned(key, value, small / own) for key, value in given[name].items()}
    return more


def _number(config: Any, *names: str) -> int | None:
    """Return a whole number of a configuration, divided by the next; None where one is missing."""
    found = [config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names]
    whole = all(type(each) is int and each for each in found)
    return functools.reduce(operator.floordiv, found) if whole else None


def with_sections(model: nn.Module, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return settings in which the parts of a head that turn by time, height and width are as long as what turns.

    They have a default in the code of a model, where its configuration says nothing; None where they fit.
    """
    for module in model.modules():
        sections, turns = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if isinstance(sections, list) and turns is not None and sum(sections) != len(turns):
            found = copy.deepcopy(settings)
            own = found
            for name in _path(model.config, module.config) or ():
                own = own[name]
            sections = _turned("mrope_section", sections, len(turns) / sum(sections))
            own["rope_parameters"] = {**(own.get("rope_parameters") or {}), "mrope_section": sections}
            return found
    return None


def _path(config: Any, part: Any) -> tuple[str, ...] | None:
    """Return the names by which a part of a configuration is found; None if it is none."""
    if config is part:
        return ()
    inner = ((name, own) for name, own in vars(config).items() if hasattr(own, "model_type"))
    paths = ((name, _path(own, part)) for name, own in inner)
    return next(((name, *path) for name, path in paths if path is not None), None)


def _turned(key: str, value: Any, share: float) -> Any:
    """Return what rotary embeddings need of a head with ``share`` of its features."""
    if isinstance(value, Mapping):
        return {name: _turned(name, each, share) for name, each in value.items()}
    if isinstance(value, list) and key == "mrope_section":
        total = max(round(sum(value) * share), 1)
        rest = [total * each // sum(value) for each in value[1:]]
        return [total - sum(rest), *rest]
    if isinstance(value, list):
        return value[: max(round(len(value) * share), 1)]
    return value
