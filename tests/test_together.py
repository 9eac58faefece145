"""All packs in one environment: each finds its own models, and none stands in the way of another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import shardcore
from shardcore.plugins.registry import Registry
from shardcore_cli import main
from shardcore_testing.parity import assert_close, assert_same_gradients

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "shardcore" / "tests"))

from support.given_packs import hook, install, installed, serves  # noqa: E402  # the core's own

# A class of every pack, and how its tiny model is made.
FAMILIES = {
    "bert": ("BertForMaskedLM", "BertConfig", {}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4}),
    "vit": ("ViTForImageClassification", "ViTConfig", {"image_size": 8, "patch_size": 4}),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 12,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
    ),
}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 97,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
}


def build(family):
    name, config, options = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**{**SMALL, **options})).double()


def inputs(family):
    ids = torch.arange(1, 13).reshape(2, 6)
    match family:
        case "vit":
            return {
                "pixel_values": torch.linspace(-1, 1, 384, dtype=torch.float64).reshape(2, 3, 8, 8),
                "labels": ids[:, 0] % 2,
            }
        case "whisper":
            return {"input_features": torch.linspace(-1, 1, 320, dtype=torch.float64).reshape(2, 8, 20), "labels": ids}
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def target(tmp_path):
    """A folder for further distributions, on `sys.path`."""
    with installed(tmp_path):
        yield tmp_path


def rows(exit_code=0):
    result = CliRunner().invoke(main, ["packs", "--json"])
    assert result.exit_code == exit_code, result.output
    return {row["name"]: row for row in json.loads(result.output)}


def test_every_pack_of_the_workspace_is_listed():
    folders = {path.parent.name for path in ROOT.glob("packs/*/pyproject.toml")}
    listed = rows()
    assert {row["distribution"] for row in listed.values()} >= folders
    for name in FAMILIES:
        assert listed[name]["status"] == "loaded", listed[name]
        assert listed[name]["tested"], name


def test_each_class_has_one_pack():
    served = [target for row in rows().values() for target in row["classes"]]
    assert len(served) > 20
    registry = Registry.discover()
    for family, (name, _, _) in FAMILIES.items():
        assert registry.resolve(getattr(transformers, name)).pack.distribution == f"shard-{family}"


def test_all_families_in_one_process(pool):
    pool.run(one_after_the_other, world=2, timeout=100)


def one_after_the_other():
    """Shard a model of every family, train each beside its unsharded twin, interleaved."""
    pairs = {family: (build(family), shardcore.shard(build(family), tp=2)) for family in FAMILIES}
    for family, (reference, model) in pairs.items():
        wanted, got = (m.train()(**inputs(family)) for m in (reference, model))
        assert_close(wanted.logits, got.logits, f"{family} logits")
        wanted.loss.backward()
        got.loss.backward()
    for reference, model in pairs.values():
        assert_same_gradients(reference, model)


def test_discovery_of_all_packs_imports_no_model_library():
    code = (
        "import sys\n"
        "from shardcore.plugins.registry import Registry\n"
        f"assert {{pack.name for pack in Registry.discover().packs}} >= {set(FAMILIES)!r}\n"
        "heavy = [name for name in ('torch', 'transformers', 'timm') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("variable", "value"), [("SHARDCORE_DISABLE_PACKS", "bert"), ("SHARDCORE_PACKS", "llama,vit")])
def test_a_blocked_pack_is_listed_and_serves_nothing(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert rows()["bert"]["status"] == "blocked"
    registry = Registry.discover()
    assert registry.resolve(transformers.LlamaForCausalLM).pack.name == "llama"
    with pytest.raises(shardcore.NoPolicyError, match=variable):
        registry.resolve(transformers.BertForMaskedLM)


@pytest.mark.parametrize(
    "plugin", ["import no_such_library\n", "raise SystemExit(3)\n", hook("shardcore_policies", "return 7", "surprise")]
)
def test_a_broken_pack_beside_them_hurts_no_other(target, plugin):
    install(target, "broken", plugin)
    listed = rows(exit_code=1)
    assert listed["broken"]["status"] == "broken"
    assert listed["broken"]["error"]
    assert all(listed[name]["status"] == "loaded" for name in FAMILIES)
    with pytest.warns(shardcore.BrokenPackWarning, match="shard-broken"):
        registry = Registry.discover()
    assert registry.resolve(transformers.ViTModel).pack.name == "vit"


LLAMA = "transformers.models.llama.modeling_llama.LlamaForCausalLM"
POLICY = """
from shard_llama.policy import LlamaPolicy

class ModelPolicy(LlamaPolicy):
    pass
"""


def test_a_third_party_overrides_by_priority(target, pool):
    install(target, "acme", serves("shard_acme", LLAMA, "priority=10"), modules={"policy": POLICY})
    match = Registry.discover().resolve(transformers.LlamaForCausalLM)
    assert match.pack.distribution == "shard-acme"
    assert match.load().__module__ == "shard_acme.policy"
    assert Registry.discover().resolve(transformers.LlamaModel).pack.name == "llama"  # what it does not name stays
    assert pool.run(shard_with, str(target), world=2) == ["shard_acme.policy"] * 2


def shard_with(folder):
    with installed(Path(folder)):
        reference, model = build("llama"), shardcore.shard(build("llama"), tp=2)
        wanted, got = (m(**inputs("llama")) for m in (reference, model))
        assert_close(wanted.logits, got.logits, "logits")
        return shardcore.Registry.discover().resolve(type(model)).load().__module__


def test_without_a_priority_it_is_a_tie_that_is_said_when_that_model_is_sharded(target):
    install(target, "acme", serves("shard_acme", LLAMA), modules={"policy": POLICY})
    registry = Registry.discover()
    assert registry.resolve(transformers.LlamaModel).pack.name == "llama"
    assert registry.resolve(transformers.BertModel).pack.name == "bert"
    with pytest.raises(shardcore.ShardcoreError, match="priority") as caught:
        registry.resolve(transformers.LlamaForCausalLM)
    for distribution in ("shard-acme", "shard-llama"):
        assert distribution in str(caught.value)


@pytest.mark.nightly
def test_each_family_is_explained():
    for name, _, _ in FAMILIES.values():
        result = CliRunner().invoke(main, ["explain", name, "--tp", "2"])
        assert result.exit_code == 0, result.output
        assert "collectives per step" in result.output
