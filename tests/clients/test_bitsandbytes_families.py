"""Families whose linears lie otherwise, with weights of 4 bits: a step is that of the model that transformers loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardcore
from shardcore_testing.parity import whole

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes", reason="weights are packed by bitsandbytes, which is not installed")

import bitsandbytes
import transformers

_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
#: Classes whose linears lie otherwise: fused, transposed before, of two stacks, with a KV head for two ranks, experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": _SIZES,
    "GPT2LMHeadModel": {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "GPTNeoXForCausalLM": _SIZES,
    "MistralForCausalLM": {**_SIZES, "num_key_value_heads": 1},
    "MixtralForCausalLM": {**_SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    "Phi3ForCausalLM": {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0},
    "T5ForConditionalGeneration": {
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 256,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
        "decoder_start_token_id": 0,
    },
}
#: Packs that do not serve the oldest release.
PACKS = {"Phi3ForCausalLM": "shard_phi", "T5ForConditionalGeneration": "shard_t5"}


def of_a_family(folder: str, name: str) -> None:
    cls = getattr(transformers, name)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)

    def load() -> Any:
        return cls.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()

    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    reference, model = load(), shardcore.shard(load(), tp=2)
    for module in reference.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.train()  # in evaluation it goes another way on CPUs, which loses gradients
    losses = [one(input_ids=ids, labels=ids).loss for one in (reference, model)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    for loss in losses:
        loss.backward()
    held = dict(model.named_parameters())
    for path, parameter in reference.named_parameters():
        assert (parameter.grad is None) == (held[path].grad is None), path
        if parameter.grad is not None:
            assert (whole(held[path].grad) - parameter.grad).norm() <= 1e-3 * parameter.grad.norm() + 1e-6, path


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_families(pool, tmp_path, name):
    cls = getattr(transformers, name)
    if name in PACKS:
        pytest.importorskip(PACKS[name], reason="the pack does not serve this release of transformers")
    torch.manual_seed(0)
    cls(cls.config_class(**FAMILIES[name])).save_pretrained(tmp_path)
    pool.run(of_a_family, str(tmp_path), name, world=2)
