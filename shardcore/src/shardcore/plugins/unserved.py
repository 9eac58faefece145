"""What is said of a model class that no installed pack serves: every way out, then who was asked."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import importlib_metadata
from packaging.requirements import Requirement

from shardcore.hooks import PolicySpec
from shardcore.plugins.isolation import in_one_line
from shardcore.plugins.loading import Pack
from shardcore.plugins.versions import installed

_IN_PYTHON = "  way out in Python: "

#: The distribution that has the index of this project's packs, if it is installed.
_INDEX = "shardcore_cli"


@functools.cache
def _index() -> Mapping[str, Any]:
    spec = importlib.util.find_spec(_INDEX)
    if spec is None or spec.origin is None:  # the tools may need any client
        return {"drafted": [], "families": {}, "folders": {"kit": ["clients/*", "kit/*"], "loaders": []}}
    found: Mapping[str, Any] = json.loads(Path(spec.origin).with_name("index.json").read_text())
    return found


def families() -> Mapping[str, str]:
    """Return start of a class's full name -> the pack of this project that serves the family.

    Packs publish it: ``tools/pack_index.py`` writes the file, which the command line brings.
    """
    found: Mapping[str, str] = _index()["families"]
    return found


def full_name(cls: type) -> str:
    """Return the name by which packs name a class: its module and its qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def unserved(
    cls: type, packs: Sequence[Pack], offers: Mapping[str, Iterable[tuple[PolicySpec, Pack]]]
) -> Iterator[str]:
    """Yield the lines of a `NoPolicyError`; of ``offers``, by full names of classes, no requirement is met."""
    names = [full_name(base) for base in cls.__mro__ if base is not object]
    yield f"no installed pack serves {names[0]}."
    yield from _ways_out(names, packs)
    yield f"{_IN_PYTHON}pass policy= (a Policy class, an instance or a mapping), which needs no pack"
    for spec, pack in (offer for name in names for offer in offers.get(name, ())):
        if spec.requires is not None:
            have = installed(Requirement(spec.requires).name) or "not installed"
            yield f"  left out: {spec.policy} of pack {pack} requires {spec.requires} (here: {have})"
    # Of the bases those that a policy may be for: not what every model of torch derives from, nor what others mix in.
    bases = [name for name in names[1:] if name.partition(".")[0] != "torch" and not name.endswith("Mixin")]
    yield f"  looked for: {', '.join([names[0], *bases])}"
    yield "  installed packs:" if packs else "  installed packs: none"
    yield from (f"    {pack}: {pack.status}: {in_one_line(pack.error)}" for pack in packs if pack.error)
    for status, by in (("blocked", " by SHARDCORE_PACKS or SHARDCORE_DISABLE_PACKS"), ("loaded", "")):
        if found := [pack.name for pack in packs if pack.status == status and not pack.error]:
            yield f"    {status}{by}: {', '.join(found)}"


def for_a_shell(text: str) -> str:
    """Return what an error says without the ways out that only a program has."""
    return "\n".join(line for line in text.split("\n") if not line.startswith(_IN_PYTHON))


def _ways_out(names: Sequence[str], packs: Sequence[Pack]) -> Iterator[str]:
    """Say which pack to install or to write."""
    starts = (pack for name in names for start, pack in families().items() if fnmatchcase(name, f"{start}*"))
    family = next(starts, None)
    here = next((pack for pack in packs if pack.distribution == family), None)
    if family and here is None:
        yield f"  way out: install {family}, the first-party pack for this family{installing(family)}"
        return
    if here is not None and here.status == "blocked":
        yield f"  the first-party pack for this family, {family}, is installed and blocked"
        yield f"  way out: let {here.name} into SHARDCORE_PACKS, or out of SHARDCORE_DISABLE_PACKS"
        return
    if here is not None and here.error is None:
        yield f"  the first-party pack for this family, {family}, is installed and serves other classes of it"
    if names[0].startswith(tuple(_index()["drafted"])):
        yield f"  way out: have a pack drafted: shardcore new-pack {_drafted(names[0])} --model {names[0]}"
        yield '  way out: policy="infer" (explain, plan: --policy infer), found and proved on a small copy of the model'
    else:
        yield "  way out: have a pack drafted: shardcore new-pack shard-mine --example module:function"


def installing(what: str) -> str:
    """Return the end of a sentence with the line that installs a pack, tools ("kit"), "loaders" or a folder.

    No index has distributions of this project yet.
    """
    folders: Sequence[str] = _index()["folders"].get(what, [what if "/" in what else f"packs/{what}"])
    if not folders:
        return ""
    sources = _sources()
    if sources is not None and all(next(sources.glob(folder), None) is not None for folder in folders):
        return f": python -m pip install {' '.join(str(sources / folder) for folder in folders)}"
    return f", from a checkout of shardcore: python -m pip install {' '.join(f'./{folder}' for folder in folders)}"


def _sources() -> Path | None:
    """Return the checkout that shardcore was installed from, as far as its metadata tells."""
    try:
        said = json.loads(importlib_metadata.distribution("shardcore").read_text("direct_url.json") or "{}")
        parts = urlsplit(said.get("url", ""))
    except Exception:  # not installed, or metadata that is damaged in any way
        return None
    return Path(url2pathname(parts.path)).parent if parts.scheme == "file" else None


def first_party() -> frozenset[str]:
    """Return the names of the packs of this project."""
    return frozenset(families().values())


def _drafted(name: str) -> str:
    """Return what a pack for a class of a library would be called: by its family, if its name tells."""
    family = re.match(r"\w+\.models\.(\w+)\.", name)
    taken = family is None or f"shard-{family[1].replace('_', '-')}" in first_party()
    return "shard-mine" if family is None or taken else f"shard-{family[1].replace('_', '-')}"
