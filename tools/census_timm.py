"""Write docs/census-timm.md: what one model of each architecture of timm comes to on two tensor-parallel ranks.

    python tools/census_timm.py                     # measure what was not measured, and write the page
    python tools/census_timm.py --only Eva Xcit     # classes, also those that were measured
    python tools/census_timm.py --table             # measure nothing: write the page

An architecture is a class of which timm's registry builds models. The first of its models is built with few and narrow
blocks and random float64 weights. It is sharded with its pack or else with a policy that is drafted from this model, as
``shardcore new-pack --example`` does, and compared with the unsharded model as `census` does. The results are in
``.nox/census-timm.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from census import ROOT, mixes_tokens, on_ranks, read, run  # from tools/
from census_page import counted, shortened  # from tools/
from census_ranks import WAYS  # from tools/
from timm.models import _registry
from torch import nn

from shardcore.errors import NoPolicyError, ShardcoreError
from shardcore.plugins.registry import default_registry
from shardcore_scaffold.draft import source
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.guess import guess
from shardcore_scaffold.inferred import policy_from

__all__ = ["main"]

PAGE = ROOT / "docs" / "census-timm.md"
RESULTS = ROOT / ".nox" / "census-timm.jsonl"
_SIDES = (64, 96, 126, 224, 240)  # of an image
_LARGEST = 8_000_000  # parameters
#: Names of arguments -> what they are in a small model: a number, or one for each stage.
_SMALL: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("depth", "depths", "num_blocks", "layers", "depth_list"), (2, 1, 2, 1, 1)),
    **dict.fromkeys(("embed_dim", "embed_dims", "dims", "channels", "widths", "width_list"), (32, 64, 96, 128, 160)),
    **dict.fromkeys(("num_heads", "heads"), (4, 8, 16, 16, 16)),
    "head_widths": (64, 48),
    "base_dims": (8, 12),
}
#: What is made small, as much as possible first: some sizes follow from others that have no such name.
_TRIES = (
    ("depth", "embed_dim", "num_heads", "head_widths", "base_dims"),
    ("depth", "embed_dim"),
    ("depth", "num_heads"),
    ("depth",),
    (),
)
_HEADER = """# Census of timm

One model of each architecture in the registry of timm {release}: a class of which it builds models. It has few and
narrow blocks and random float64 weights, and is sharded over two tensor-parallel ranks beside the same model
unsharded; what is compared is the output and every gradient of one call. *way* is the pack that serves the class, or
`drafted`: by a policy that `shardcore new-pack --example` writes from this model. *error* and *split* are those of the
[census of transformers](census.md).

Of {count} architectures: {said}. Of the {mixing} with attention, or with what mixes tokens in its place: {blocks}. The
others are convolutions throughout, of which tensor parallelism splits little or nothing.

`nox -s census -- timm` measures the architectures that are missing here, and writes this page.

| class | model | way | error | split | |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Architecture:
    """A class of which the registry builds models, the first of these, and what the class is called with for it."""

    cls: type[nn.Module]
    model: str
    arguments: Mapping[str, Any]


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Return the architectures of the registry by the names of their classes."""
    found: dict[str, Architecture] = {}

    def asked(model_cls: type[nn.Module], variant: str, pretrained: bool = False, **given: Any) -> nn.Module:
        kinds = [kind for kind in reversed(model_cls.__mro__) if issubclass(kind, nn.Module) and kind is not nn.Module]
        taken = {name: p for kind in kinds for name, p in inspect.signature(kind).parameters.items()}
        arguments = {name: p.default for name, p in taken.items() if p.default is not p.empty}
        arguments |= {"in_chans": 3} if "in_chans" in taken else {}
        arguments |= {name: value for name, value in given.items() if name in taken}
        if "model_cfg" in given:
            arguments["cfg"] = given["model_cfg"]
        found.setdefault(model_cls.__name__, Architecture(model_cls, variant, arguments))
        return nn.Identity()

    builds = [module for name, module in sys.modules.items() if name.startswith("timm.models.")]
    with contextlib.ExitStack() as patched:
        patched.enter_context(warnings.catch_warnings(action="ignore"))  # names that were others once
        for module in builds:
            if hasattr(module, "build_model_with_cfg"):
                patched.enter_context(mock.patch.object(module, "build_model_with_cfg", asked))
        for make in _registry._model_entrypoints.values():
            make(pretrained=False)
    return found


def small(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a small model of an architecture, in float64 and evaluation, and a call; raise what the first try did."""
    which = architectures()[name]
    error: Exception | None = None
    for kinds, side in itertools.product(_TRIES, _SIDES):
        allowed = {key for key, value in _SMALL.items() if any(value is _SMALL[kind] for kind in kinds)}
        arguments = {key: _size(key, value, allowed) for key, value in which.arguments.items()}
        arguments |= {"img_size": side} if "img_size" in arguments else {}
        image = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        try:
            model = which.cls(**{**arguments, "num_classes": 10} if "num_classes" in arguments else arguments)
            if sum(p.numel() for p in model.parameters()) > _LARGEST:
                raise ValueError(f"{which.model} has more than {_LARGEST:,} parameters with the sizes known here")
            model.double().eval()
            inputs = {next(iter(inspect.signature(model.forward).parameters)): image}
            with torch.no_grad():
                copy.deepcopy(model)(**inputs)  # what it keeps of a call, the model does not have
        except Exception as failed:
            error = error or failed  # of the smallest, which says the most
        else:
            return _drawn(model), inputs
    assert error is not None
    raise error


def _size(key: str, value: Any, allowed: Collection[str]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _size(name, each, allowed) for name, each in fields.items()})
    if key in allowed and type(value) is int:
        return _SMALL[key][0]
    if key in allowed and isinstance(value, list | tuple) and all(type(each) is int for each in value):
        if key.startswith(("depth", "layers")):
            return type(value)(min(each, small) for each, small in zip(value, _SMALL[key], strict=False))
        distinct = list(dict.fromkeys(value))  # what is equal stays so
        return type(value)(_SMALL[key][distinct.index(each)] for each in value)
    if key in allowed and isinstance(value, list | tuple):
        return type(value)(_size(key, each, allowed) for each in value)
    return value


def _drawn(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def measure(name: str) -> dict[str, Any]:
    """Return what one architecture comes to: its ``state``, with the ``reason`` or the errors."""
    which = architectures()[name]
    found: dict[str, Any] = {"blocks": None}
    with contextlib.suppress(Exception), torch.device("meta"):  # some classes compute with numbers
        found["blocks"] = mixes_tokens(which.cls(**which.arguments))
    torch.manual_seed(0)
    try:
        model, inputs = small(name)
    except Exception as error:
        return {**found, "state": "not built", "reason": f"{type(error).__name__}: {error}"}
    found["blocks"], policy = mixes_tokens(model), None
    try:
        found["way"] = default_registry().resolve(type(model)).pack.name
    except NoPolicyError:
        found["way"] = "drafted"
        try:
            draft = guess(Facts(copy.deepcopy(model), lambda small: small(**inputs)))
        except ShardcoreError as error:
            return {**found, "state": "refused", "reason": str(error)}
        policy = policy_from(name, source(type(model), draft))
        found["doubts"] = list(dict.fromkeys(draft.doubts))
    found |= on_ranks(model, inputs, policy)
    if found["state"] == "exact" and not found["split"]:
        return {**found, "state": "refused", "reason": f"nothing could be split: {'; '.join(found['doubts'])}"}
    return found


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page: the totals, and a row for each architecture."""
    mixing = [result for result in results.values() if result.get("blocks") is not False]
    lines = []
    for name, result in sorted(results.items()):
        numbers = (f"{result['error']:.0e}", f"{result['split']:.2f}") if result["state"] == "exact" else ("", "")
        why = "" if result["state"] == "exact" else f"{result['state']}: `{shortened(result['reason'])}`"
        cells = (f"`{name}`", f"`{architectures()[name].model}`", result.get("way", ""), *numbers, why)
        lines.append(f"| {' | '.join(cells)} |")
    head = _HEADER.format(
        release=timm.__version__,
        count=len(results),
        said=counted(results.values()),
        mixing=len(mixing),
        blocks=counted(mixing),
    )
    return head + "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="classes")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no class after so many")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    WAYS.clear()  # those of transformers
    names = given.only or [name for name in architectures() if name not in read(given.results)]
    if not given.table:
        run(names, dict.fromkeys(names, "timm"), given.minutes, given.results, measure, timm.__version__)
    found = {name: result for name, result in read(given.results).items() if name in architectures()}
    given.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
