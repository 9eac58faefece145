"""The first Qwen beyond its cases: loaded with its code; caches; texts longer than it was made for; and as a Qwen2."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

import shardcore
from shard_qwen.conversion import convert
from shard_qwen.first_cases import CODE, build
from shardcore.comm.strided import torch_lacks
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_testing import text_batch
from shardcore_testing.parity import whole
from shardcore_transformers._context import CONTEXT

CAUSAL = "QWenLMHeadModel"
AUTO = {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": f"modeling_qwen.{CAUSAL}"}

FUSED = pytest.mark.skipif(torch_lacks() is not None, reason="fused linears need torch 2.12")
DIVIDED = pytest.mark.skipif(CONTEXT.lacks() is not None, reason="context parallelism needs transformers 5.24")


def saved(folder, **options):
    model = build(CAUSAL, **options)
    model.save_pretrained(folder, max_shard_size="40KB")
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": AUTO}))
    return model


def as_native(folder, out):
    native = build(CAUSAL)
    batch = text_batch(native, 1)
    wanted = native(**batch)
    wanted.loss.backward()
    model = shardcore.from_pretrained("AutoModelForCausalLM", folder, tp=2, trust_remote_code=True)
    got = model(**batch)
    got.loss.backward()
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-12, rtol=0)
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(whole(dict(model.named_parameters())[name].grad), parameter.grad, atol=1e-12, rtol=0)
    model.save_pretrained(out)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    torch.testing.assert_close(again(**batch).logits, wanted.logits, atol=1e-12, rtol=0)


@FUSED
def test_from_pretrained(pool, tmp_path):
    saved(tmp_path / "qwen")
    pool.run(as_native, str(tmp_path / "qwen"), str(tmp_path / "saved"))


@torch.no_grad()
def in_evaluation(fields):
    model, ids = build(CAUSAL, seq_length=4).eval(), torch.arange(2, 14).view(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    wanted = model(ids, attention_mask=mask).logits, model(ids, use_cache=True)
    model = shardcore.shard(model, **fields)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, wanted[0], atol=1e-12, rtol=0)
    got = model(ids, use_cache=True)
    torch.testing.assert_close(got.logits, wanted[1].logits, atol=1e-12, rtol=0)
    assert got.past_key_values[0][0].shape == (2, 6, 2, 12)  # of this rank's heads


@FUSED
@pytest.mark.parametrize("sequence", [False, True])
def test_longer_than_it_was_made_for(pool, sequence):
    """Rotations are slowed, by the length of each row, and queries grow."""
    pool.run(in_evaluation, {"tp": 2, "enable_sequence_parallelism": sequence})


@FUSED
def test_a_generate_of_its_own():
    """Such as the published code has, which transformers makes a model that generates only where it loads it."""
    model = build(CAUSAL)
    model.__class__ = type(CAUSAL, (type(model),), {"__module__": type(model).__module__, "generate": lambda self: 7})
    assert shardcore.shard(model, tp=1).generate() == 7


def divided(padding):
    options = {"seq_length": 8, "use_logn_attn": False}
    model, ids, mask = build(CAUSAL, **options), torch.arange(36).view(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, 7:] = 0
    batch = {"input_ids": ids, "labels": ids}
    if padding:
        batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    sharded = shardcore.shard(build(CAUSAL, **options), cp=2)
    wanted, got = model(**batch), sharded(**batch)
    wanted.loss.backward()
    got.loss.backward()
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-12, rtol=0)
    for name, parameter in model.named_parameters():
        grad = whole(dict(sharded.named_parameters())[name].grad)
        torch.testing.assert_close(grad, parameter.grad, atol=1e-12, rtol=0)
    with torch.no_grad():
        wanted, got = model.eval()(ids), sharded.eval()(ids)  # slowed alike in all rows
        torch.testing.assert_close(got.logits, wanted.logits, atol=1e-12, rtol=0)
    with pytest.raises(NotSupportedError, match=r"12 tokens, more than its seq_length 8.*pass no mask"):
        sharded(ids, attention_mask=mask)
    with pytest.raises(NotSupportedError, match="rows that begin with padding: pad at their end"):
        sharded(ids[:, :8], attention_mask=mask.flip(1)[:, :8])


@FUSED
@DIVIDED
@pytest.mark.parametrize("padding", [False, True])
def test_tokens_over_ranks(pool, padding):
    pool.run(divided, padding)


def test_as_a_qwen2(tmp_path):
    native = saved(tmp_path / "qwen", rotary_emb_base=777.0)
    convert(tmp_path / "qwen", tmp_path / "qwen2")
    model, info = Qwen2ForCausalLM.from_pretrained(tmp_path / "qwen2", output_loading_info=True)
    assert not any(info.values())
    batch = text_batch(native, 1)
    wanted, got = native(**batch), model(**batch)
    seen = batch["attention_mask"].bool()  # what padding computes is nobody's concern
    # transformers makes the angles of positions in float32, whatever the dtype.
    assert (got.logits - wanted.logits)[seen].abs().max() < 1e-6
    assert (got.loss - wanted.loss).abs() < 1e-6


def test_what_cannot_be_a_qwen2(tmp_path):
    saved(tmp_path, rotary_pct=0.5)
    with pytest.raises(ConfigError, match=r"rotary_pct=0.5 cannot be a Qwen2, which knows 1.0 alone"):
        convert(tmp_path, tmp_path / "qwen2")
