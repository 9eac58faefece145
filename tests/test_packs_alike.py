"""What is the same in every pack of this repository is written once: in `shardcore_scaffold` and tools/new_pack.py."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from new_pack import common_files  # noqa: E402  # from tools/

import pack_index  # noqa: E402  # from tools/
from cells import find_packs  # noqa: E402  # from tools/
from shardcore_scaffold.distribution import Distribution  # noqa: E402

PACKS = find_packs(ROOT)
#: What a pack may add to: these have to be there as they are, and more may follow.
EXTENDED = ("README.md", "tests/test_conformance.py")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.name)
def test_files_are_those_of_every_pack(pack):
    metadata = tomllib.loads((pack.folder / "pyproject.toml").read_text())
    distribution = Distribution.of(metadata)
    for name, wanted in common_files(distribution).items():
        found = (pack.folder / name).read_text()
        if name == "README.md":
            assert found.startswith(f"# {distribution.name}\n\nThe pack that teaches shardcore "), name
            for sentence in ("nothing to import or to register.", "The extra `tested` (`./packs/", "Apache-2.0."):
                assert sentence in words(found), (name, sentence)
            assert "<!-- run: 2 ranks -->\n```python\nimport shardcore\n" in found, "there is no example that runs"
            assert f"](../../MODELS.md#{distribution.name})" in found
            assert found.count("\n") <= 30, "what else there is to know stands in docs/families.md"
        elif name.startswith("src/") and name.endswith("__init__.py"):
            assert found.count("\n") == 1, name  # a docstring and nothing else
        elif name in EXTENDED:
            assert f'    plugin = "{distribution.package}.plugin"\n' in found
            assert found.startswith(wanted.partition("\n")[0]), name
        else:
            assert found == wanted, f"{pack.name}/{name} differs from what tools/new_pack.py writes"


def test_every_part_of_the_metadata_is_kept():
    written = Distribution(
        name="shard-x-y",
        version="1.2.3",
        description='It says "x"',
        dependencies=["shardcore>=0.1,<0.2"],
        extras={"tested": ["a>=1"], "testing": ["b"]},
        matrix={"a": ["1", "2"]},
        license="MIT",
        authors=["Somebody", 'Some "body" else'],
        keywords=["k" * 70, "l" * 70],
        classifiers=["Typing :: Typed"],
        urls={"Homepage": "https://pypi.org/project/shard-x-y/"},
        data=["d==1"],
        whole=True,
        pytest={"addopts": ["-p", "x"], "timeout": 600},
    )
    read = Distribution.of(tomllib.loads(written.pyproject()))
    assert read.pyproject() == written.pyproject()
    for name in Distribution.__slots__:
        assert getattr(read, name) == getattr(written, name), name


@pytest.mark.parametrize(
    ("model", "pack"), [("vision_transformer.VisionTransformer", "vit"), ("mvitv2.MultiScaleVit", "swin")]
)
def test_the_index_tells_the_packs_of_timm_apart(model, pack):
    families = json.loads(pack_index.FILE.read_text())["families"]
    starts = [start for start in families if f"timm.models.{model}".startswith(start)]
    assert [families[start] for start in starts] == [f"shard-{pack}"]


def test_the_index_that_the_command_line_brings_is_of_these_packs():
    """After a change of a pack's targets or requirements: ``python tools/pack_index.py --write``."""
    assert pack_index.FILE.read_text() == pack_index.index()
