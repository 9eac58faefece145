"""A pack of this repository: the files that are the same for all of them.

    python tools/new_pack.py shard-qwen "The Qwen family of transformers" --needs shard-llama

writes them; ``policy.py``, ``cases.py`` and ``plugin.py`` are the pack's own, and the example in its README is. What
classes it serves, tools/model_table.py writes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from shardcore_scaffold.distribution import Distribution

__all__ = ["common_files", "write"]

ROOT = Path(__file__).parents[1]
LIKE = ROOT / "packs" / "shard-llama"

README = """\
# {name}

The pack that teaches shardcore {what}. Once it is installed, shardcore finds it; there is
nothing to import or to register. From a checkout:

```
pip install ./shardcore {folders}
```

[Classes](../../MODELS.md#{name}). {tested}
"""

#: What the README of every pack says of the releases it was tested with.
TESTED = (
    "The extra `tested` (`./packs/{name}[tested]`) keeps transformers within\n"
    "the range that its tests cover. Licence: Apache-2.0."
)

TESTS = '''\
"""What every pack is held to; the cases are in `{package}.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class Test{title}(PolicyConformance):
    plugin = "{package}.plugin"
'''


def common_files(distribution: Distribution) -> dict[str, str]:
    """Return the text of every file that follows from the metadata, by its path in the pack's folder."""
    package = distribution.package
    what = distribution.description.removesuffix(" for shardcore")
    needs = [Requirement(text).name for text in distribution.dependencies]
    rooms = {"shardcore": "clients", "shard": "packs"}
    ours = [name for name in (*needs, distribution.name) if name.startswith(("shardcore-", "shard-"))]
    folders = [f"./{rooms[name.partition('-')[0]]}/{name}" for name in ours]
    title = "".join(part.capitalize() for part in distribution.short.split("-"))
    return {
        "pyproject.toml": distribution.pyproject(),
        "LICENSE": (LIKE / "LICENSE").read_text(),
        "README.md": README.format(
            name=distribution.name,
            what=what.replace("The ", "the ", 1) if what.startswith("The ") else what,
            folders=" ".join(folders),
            tested=TESTED.format(name=distribution.name),
        ),
        f"src/{package}/__init__.py": f'"""{what}, for shardcore."""\n',
        f"src/{package}/py.typed": "",
        "tests/test_conformance.py": TESTS.format(package=package, title=title),
    }


def write(distribution: Distribution) -> Path:
    """Write the common files of a new pack and return its folder.

    Raises:
        FileExistsError: there is such a folder.
    """
    folder = ROOT / "packs" / distribution.name
    folder.mkdir()
    try:
        for name, text in common_files(distribution).items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder


def main(arguments: list[str]) -> None:
    """Write a pack like shard-llama."""
    parser = argparse.ArgumentParser(description="Write the files of a new pack that follow from its metadata.")
    parser.add_argument("name", help="of the distribution, such as shard-qwen")
    parser.add_argument("description", help='such as "The Qwen family of transformers"')
    parser.add_argument("--needs", action="append", default=[], help="another pack whose policies it derives from")
    options = parser.parse_args(arguments)
    like = Distribution.of(tomllib.loads((LIKE / "pyproject.toml").read_text()))
    short = options.name.removeprefix("shard-")
    folder = write(
        Distribution(
            name=options.name,
            description=f"{options.description} for shardcore",
            dependencies=[*like.dependencies, *(f"{name}>=0.1,<0.2" for name in options.needs)],
            extras={"tested": like.extras["tested"]},
            matrix=like.matrix,
            license=like.license,
            authors=like.authors,
            keywords=[short if word == like.short else word for word in like.keywords],
            classifiers=like.classifiers,
            urls={label: url.replace(like.name, options.name) for label, url in like.urls.items()},
        )
    )
    sys.stdout.write(f"{folder}: write src/{short}/policy.py, cases.py and plugin.py\n")


if __name__ == "__main__":
    main(sys.argv[1:])
