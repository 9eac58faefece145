"""ViT of transformers has two layouts of modules; the release decides which policy serves it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import transformers.models.vit.modeling_vit as library
from packaging.requirements import Requirement
from packaging.version import Version
from vit_cases import case, policy

import shardcore
from shard_vit.before59 import OldViTPolicy
from shard_vit.plugin import shardcore_policies
from shard_vit.policy import ViTPolicy

NAMES = ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling")
#: What the wheels of these releases hold: 5.8.1 is the last one with ViTSelfAttention.
OLD = ("4.57.6", "5.0.0", "5.5.4", "5.8.0", "5.8.1")
NEW = ("5.9.0", "5.10.1", "5.10.4", "5.17.0", "5.23.0", "5.24.0")


def _offered(name: str, version: str) -> list[str]:
    target = f"{library.__name__}.{name}"
    specs = [spec for spec in shardcore_policies() if spec.target == target]
    return [
        spec.policy
        for spec in specs
        if Requirement(spec.requires).specifier.contains(Version(version), prereleases=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_each_release_has_one_policy(name):
    assert {tuple(_offered(name, version)) for version in OLD} == {("shard_vit.before59:OldViTPolicy",)}
    assert {tuple(_offered(name, version)) for version in NEW} == {("shard_vit.policy:ViTPolicy",)}


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_release_gets_the_policy_for_its_modules(name):
    is_old = hasattr(library, "ViTSelfAttention")
    assert policy(getattr(library, name)) is (OldViTPolicy if is_old else ViTPolicy)
    assert is_old == (Version(importlib.metadata.version("transformers")) < Version("5.9.0"))


@pytest.mark.parametrize("name", ["model", "image_classification"])
def test_the_other_layout_is_refused(name):
    other = ViTPolicy if hasattr(library, "ViTSelfAttention") else OldViTPolicy
    with pytest.raises(shardcore.PlanError, match=r"(?s)ViTModel has no attribute .*too new or old"):
        shardcore.compile_plan(other, case(name).build(), shardcore.ShardConfig(tensor_parallel_size=2))


def test_heads_that_do_not_divide_are_one_error():
    model = case("model").build(num_attention_heads=3)
    with pytest.raises(shardcore.PlanError, match=r"3 query heads .* cannot be split over 2 ranks"):
        shardcore.compile_plan(policy(type(model)), model, shardcore.ShardConfig(tensor_parallel_size=2))


@pytest.mark.nightly
def test_discovery_imports_no_library_of_models():
    script = (
        "import sys, importlib_metadata\n"
        "from shardcore.plugins.registry import GROUP, Registry\n"
        "entry = importlib_metadata.EntryPoint(name='vit', value='shard_vit.plugin', group=GROUP)\n"
        "registry = Registry.discover([entry])\n"
        "loaded = [n for n in ('torch', 'transformers', 'timm', 'torchvision') if n in sys.modules]\n"
        "assert registry.packs[0].specs and not loaded, loaded\n"
        "import transformers\n"
        "match = registry.resolve(transformers.ViTModel)\n"
        "match.load()\n"
        "assert 'timm' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
