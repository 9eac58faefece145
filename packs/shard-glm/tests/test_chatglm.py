"""ChatGLM2 beyond its cases: loaded with its code, of which none runs unless it is trusted; caches; and as a GLM."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GlmForCausalLM

import shardcore
from shard_glm.chatglm_cases import CODE, build, inputs
from shard_glm.conversion import convert
from shardcore.errors import ConfigError, PlanError
from shardcore_testing.parity import whole
from shardcore_transformers import remote_class
from shardcore_transformers._context import CONTEXT
from shardcore_transformers.loading import load_empty

CAUSAL = "ChatGLMForConditionalGeneration"
AUTO = {"AutoConfig": "configuration_chatglm.ChatGLMConfig", "AutoModelForCausalLM": f"modeling_chatglm.{CAUSAL}"}


def saved(folder, *, raises=False):
    model = build(CAUSAL)
    model.save_pretrained(folder, max_shard_size="40KB")
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
        if raises:
            (folder / file.name).write_text("raise SystemExit('code ran')\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": AUTO}))
    return model


def refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        shardcore.from_pretrained("AutoModelForCausalLM", folder, tp=2, **options)


def test_code_that_is_not_trusted_does_not_run(pool, tmp_path):
    saved(tmp_path, raises=True)
    pool.run(refused, str(tmp_path), {}, r"If you trust it, pass trust_remote_code=True")
    pool.run(refused, str(tmp_path), {"trust_remote_code": False}, r"pass trust_remote_code=True")


def test_code_that_cannot_be_imported(pool, tmp_path):
    saved(tmp_path)
    with (tmp_path / "modeling_chatglm.py").open("a") as file:
        file.write("\nraise ValueError('a broken file')\n")
    pool.run(refused, str(tmp_path), {"trust_remote_code": True}, "ChatGLMForC.* ValueError: a broken file. Correct")


def as_native(folder, out):
    native = build(CAUSAL)
    batch = inputs(native, 1)
    wanted = native(**batch)
    wanted.loss.backward()
    empty, weights, _ = load_empty("AutoModelForCausalLM", folder, trust_remote_code=True)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert weights.recipes.keys() == dict(native.named_parameters()).keys()
    model = shardcore.from_pretrained("AutoModelForCausalLM", folder, tp=2, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    got = model(**batch)
    got.loss.backward()
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-12, rtol=0)
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(whole(dict(model.named_parameters())[name].grad), parameter.grad, atol=1e-12, rtol=0)
    model.save_pretrained(out)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)  # the code is beside the weights
    assert torch.equal(again(**batch).logits, wanted.logits)


def test_from_pretrained(pool, tmp_path):
    saved(tmp_path / "chatglm2")
    pool.run(as_native, str(tmp_path / "chatglm2"), str(tmp_path / "saved"))


def test_one_rank_alone():
    native, model = build(CAUSAL), shardcore.shard(build(CAUSAL), tp=1)
    batch = inputs(native, 1)
    wanted, got = (each(**batch, output_hidden_states=True) for each in (native, model))
    for states, others in zip(wanted.hidden_states, got.hidden_states, strict=True):
        torch.testing.assert_close(others, states, atol=1e-12, rtol=0)
    wanted.loss.backward()
    got.loss.backward()
    for one, other in zip(native.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-12, rtol=0)


@torch.no_grad()
def with_a_cache(fields):
    model, ids = build(CAUSAL).eval(), torch.arange(2, 14).view(2, 6)
    wanted = model(ids).logits
    model = shardcore.shard(model, **fields)
    first = model(ids[:, :3], use_cache=True)
    assert first.past_key_values[0][0].shape == (3, 2, 1, 8)  # of this rank's group
    second = model(ids[:, 3:5], past_key_values=first.past_key_values, use_cache=True, position_ids=positions(3, 5))
    third = model(ids[:, 5:], past_key_values=second.past_key_values, use_cache=True, position_ids=positions(5, 6))
    got = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


def positions(start, stop):
    return torch.arange(start, stop).expand(2, -1)


@pytest.mark.parametrize("sequence", [False, True])
def test_caches(pool, sequence):
    pool.run(with_a_cache, {"tp": 2, "enable_sequence_parallelism": sequence})


def divided(rows):
    """Compare, with as many rows as tokens too, where neither is told by its size."""
    native = build(CAUSAL)
    ids = torch.arange(rows * 8).view(rows, 8) % 101
    wanted = native(input_ids=ids, labels=ids)
    (wanted.loss + wanted.logits.square().mean()).backward()
    model = shardcore.shard(build(CAUSAL), cp=2)
    got = model(input_ids=ids, labels=ids)
    (got.loss + got.logits.square().mean()).backward()
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-12, rtol=0)
    for name, parameter in native.named_parameters():
        torch.testing.assert_close(whole(dict(model.named_parameters())[name].grad), parameter.grad, atol=1e-12, rtol=0)


@pytest.mark.skipif(CONTEXT.lacks() is not None, reason="context parallelism needs transformers 5.24")
def test_tokens_over_ranks(pool):
    pool.run(divided, 3)
    pool.run(divided, 8)


def test_a_layout_with_rows_first_is_refused():
    model = build(CAUSAL)
    embedding = type(model.transformer.embedding)
    rows_first = type("Embedding", (embedding,), {"forward": lambda self, ids: self.word_embeddings(ids)})
    model.transformer.embedding.__class__ = rows_first
    with pytest.raises(PlanError, match=r"(?s)activations are \(B, S, H\).*load such a checkpoint as GlmForCausalLM"):
        shardcore.shard(model, tp=1)


def test_shapes_are_looked_for_without_a_fuser():
    """The rotation of the published code is scripted, with a fuser that raises on the meta device."""
    model, seen = shardcore.shard(build(CAUSAL), tp=1).to("meta"), []
    attention = model.transformer.encoder.layers[0].self_attention
    attention.query_key_value.register_forward_hook(lambda *_: seen.append(torch._C._get_graph_executor_optimize()))
    model(torch.zeros(1, 3, dtype=torch.long, device="meta"))
    assert seen == [False]
    assert torch._C._get_graph_executor_optimize()


@pytest.mark.parametrize("pickled", [False, True])
def test_as_a_glm(tmp_path, pickled):
    native = saved(tmp_path / "chatglm2")
    if pickled:
        for file in (tmp_path / "chatglm2").glob("model*"):
            file.unlink()
        torch.save(native.state_dict(), tmp_path / "chatglm2" / "pytorch_model.bin")
    convert(tmp_path / "chatglm2", tmp_path / "glm")
    model, info = GlmForCausalLM.from_pretrained(tmp_path / "glm", output_loading_info=True)
    assert not any(info.values())
    batch = inputs(native, 1)
    wanted, got = native(**batch), model(**batch)
    seen = batch["attention_mask"].bool()  # what padding computes is nobody's concern
    # transformers makes the angles of positions in float32, whatever the dtype.
    assert (got.logits - wanted.logits)[seen].abs().max() < 4e-7
    assert (got.loss - wanted.loss).abs() < 4e-7


def test_what_cannot_be_a_glm(tmp_path):
    cls = remote_class(f"modeling_chatglm.{CAUSAL}", CODE)
    cls(cls.config_class(num_layers=1, hidden_size=16, ffn_hidden_size=8, kv_channels=4, num_attention_heads=4,
                         padded_vocab_size=11, rmsnorm=False)).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ConfigError, match=r"rmsnorm=False cannot be a GLM, which knows True alone.*trust_remote_code"):
        convert(tmp_path, tmp_path / "glm")
