"""The pack for Llama as its users get it: installed, found by itself, and never imported before it is needed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore_testing.parity import assert_close, assert_same_gradients

transformers = pytest.importorskip("transformers")


class MyLlama(transformers.LlamaForCausalLM):
    """A user's own model: no pack names it, its base is found along the MRO."""


class Unknown(nn.Module):
    """A model that no pack serves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def _llama(cls: type = transformers.LlamaForCausalLM) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    return cls(config).double()


def test_one_line_shards_a_llama(pool):
    pool.run(_one_line, world=2)


def _one_line() -> None:
    reference = _llama()
    ids = torch.arange(1, 13).reshape(2, 6)
    for cls in (transformers.LlamaForCausalLM, MyLlama):
        model = _llama(cls)
        assert shardcore.shard(model, tp=2) is model
        assert isinstance(model, cls)
        reference.zero_grad()
        wanted, got = reference(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids)
        assert_close(wanted.logits, got.logits, "logits")
        wanted.loss.backward()
        got.loss.backward()
        assert_same_gradients(reference, model)


@pytest.mark.parametrize("cls", ["LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification",
                                 "LlamaForQuestionAnswering"])  # fmt: skip
def test_every_class_of_the_pack_is_found(cls):
    match = shardcore.Registry.discover().resolve(getattr(transformers, cls))
    assert match.pack.distribution == "shard-llama"
    assert match.load().__name__ == "LlamaPolicy"


def test_a_model_that_no_pack_serves_is_an_error_on_every_rank(pool):
    for message in pool.run(_unknown, world=2):
        assert "Unknown" in message
        assert ", llama, " in message  # what is installed is named


def _unknown() -> str:
    with pytest.raises(shardcore.NoPolicyError) as caught:
        shardcore.shard(Unknown(), tp=2)
    return str(caught.value)


def test_a_model_known_to_one_rank_only_is_an_error_on_every_rank(pool):
    assert pool.run(_one_knows, world=2) == ["AgreementError", "NoPolicyError"]


def _one_knows() -> str:
    model = _llama() if dist.get_rank() == 0 else Unknown()
    with pytest.raises(shardcore.ShardcoreError) as caught:
        shardcore.shard(model, tp=2)
    return type(caught.value).__name__


def test_discovery_lists_the_pack_with_its_version():
    packs = {pack.name: pack for pack in shardcore.Registry.discover().packs}
    assert packs["llama"].distribution == "shard-llama"
    assert packs["llama"].version == importlib.metadata.version("shard-llama")


def test_discovery_loads_neither_torch_nor_transformers():
    code = (
        "import sys, shardcore, shard_llama.plugin\n"
        "from shardcore.plugins.registry import Registry\n"
        "names = [pack.name for pack in Registry.discover().packs]\n"
        "assert 'llama' in names, names\n"
        "heavy = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
