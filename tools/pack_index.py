"""Write which pack of this workspace serves which classes, for the errors of those who have not installed it.

    python tools/pack_index.py            # print it
    python tools/pack_index.py --write    # into the command line's distribution

A class is named by the start of its full name: its family in transformers, its library, or itself. Needs the packs
installed, and no library that they serve.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from cells import Pack, find_packs  # from tools/

__all__ = ["index"]

ROOT = Path(__file__).parents[1]
FILE = ROOT / "kit" / "shardcore-cli" / "src" / "shardcore_cli" / "index.json"

#: What of a class's full name says to which family it belongs.
_FAMILY = re.compile(r"(?:transformers|timm)\.models\.\w+\.|torch\.nn\.modules\.transformer\.|.*")

#: Starts of the names of classes that `shardcore new-pack --model` takes, and policy="infer" too.
_DRAFTED = ["transformers."]
#: What pip is given for the tools, and for what loads what a library has saved.
_AROUND = {
    "kit": ["clients/shardcore-transformers", "kit/shardcore-*"],
    "loaders": ["clients/shardcore-transformers"],
}


def index() -> str:
    """Return the text of the file: the pack of each family, the folders that pip is given, and what tools can do."""
    packs = find_packs(ROOT)
    families: dict[str, str] = {}
    for pack in packs:
        plugin = importlib.import_module(f"{pack.name.replace('-', '_')}.plugin")
        for spec in plugin.shardcore_policies():
            match = _FAMILY.match(spec.target)
            assert match is not None  # it matches anything
            families.setdefault(match[0], pack.name)
    folders = {pack.name: _folders([*pack.needed(packs), pack]) for pack in packs} | _AROUND
    return json.dumps({"drafted": _DRAFTED, "families": families, "folders": folders}, indent=1, sort_keys=True) + "\n"


def _folders(packs: Sequence[Pack]) -> list[str]:
    """Return what is installed besides the core, by its path in the workspace."""
    needs = {Requirement(text).name for pack in packs for text in pack.dependencies}
    clients = [f"clients/{name}" for name in sorted(needs) if name.startswith("shardcore-")]
    return [*clients, *dict.fromkeys(f"packs/{pack.name}" for pack in packs)]


def main() -> None:
    """Print or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.relative_to(ROOT)}")
    if parser.parse_args().write:
        FILE.write_text(index())
    else:
        sys.stdout.write(index())


if __name__ == "__main__":
    main()
