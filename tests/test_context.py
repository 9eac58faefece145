"""Context parallelism in families beyond their conformance cases, and of which nothing can be divided."""

from __future__ import annotations

import copy

import pytest
import torch

import shardcore
from shardcore._torch import CAN_PIPELINE
from shardcore.errors import NotSupportedError, PlanError
from shardcore.nn.context.shard import ContextShard
from shardcore_shardformer import Booster, HybridParallelPlugin
from shardcore_testing import no_float32_islands
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
shardcore_peft = pytest.importorskip("shardcore_peft")

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "attn_implementation": "sdpa",
}
_DECODER = {"num_key_value_heads": 2, "head_dim": 8}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WINDOWS = ["full_attention", "sliding_attention", "full_attention"]

#: Class -> the options of its configuration.
_SERVED = {
    "Qwen3ForCausalLM": {**_DECODER, "use_sliding_window": True, "sliding_window": 5, "layer_types": _WINDOWS},
    "MixtralForCausalLM": {
        **_DECODER,
        "sliding_window": 6,
        "num_local_experts": 4,
        "output_router_logits": True,  # their balance is that of all tokens
        "router_aux_loss_coef": 0.5,
        "experts_implementation": "eager",
    },
    "BertForSequenceClassification": _NO_DROPOUT,
    "ModernBertForMaskedLM": {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
}
#: Two stacks, of which the second attends to all of the first: unequal numbers of heads, and no dropout.
_TWO_STACKS = {
    "d_model": 48,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 40),
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}
_SERVED["BartForConditionalGeneration"] = _TWO_STACKS

#: Class -> its configuration, and why nothing is divided.
_REFUSED = {
    "T5ForConditionalGeneration": (
        {"d_model": 32, "d_ff": 40, "num_layers": 1, "num_heads": 4},
        "a bias for positions",
    ),
    "DebertaV2ForMaskedLM": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        "computes attention by itself",
    ),
    "GPT2LMHeadModel": (
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "add_cross_attention": True},
        "the states of an encoder",
    ),
    "BertLMHeadModel": ({**_SIZES, "is_decoder": True}, "the policy does not say"),
}


def _build(name, options):
    torch.manual_seed(0)
    config = name[: name.index("For")] if "For" in name else name.replace("LMHeadModel", "")
    model = getattr(transformers, name)(getattr(transformers, f"{config}Config")(**options))
    return model.double().eval()


def _inputs(model, left):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (2, 37), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask = mask if left else mask.flip(1)
    labels = torch.tensor([0, 1]) if "Sequence" in type(model).__name__ else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def _same(names, fields):
    for name in names:
        reference = _build(name, {**_SIZES, **_SERVED[name]})
        sharded = shardcore.shard(copy.deepcopy(reference), **fields)
        for left in (True, False):
            inputs = _inputs(reference, left)
            wanted, got = reference(**inputs), sharded(**inputs)
            assert_close(wanted.loss, got.loss, f"loss of {name}")
            assert_close(wanted.logits, got.logits, f"logits of {name}")
            wanted.loss.backward()
            got.loss.backward()
        assert_same_gradients(reference, sharded)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@no_float32_islands()
def test_families(pool, mode):
    pool.run(_same, list(_SERVED), {"cp": 2, "context_parallel_mode": mode})


@no_float32_islands()
def test_encoders_on_four_ranks(pool):
    pool.run(_same, ["BertForSequenceClassification", "ModernBertForMaskedLM"], {"cp": 2, "tp": 2}, world=4)


def _refuses():
    for name, (options, words) in _REFUSED.items():
        model = _build(name, {"vocab_size": 97, **options})
        with pytest.raises(PlanError, match=words):
            shardcore.shard(model, cp=2)


def test_what_is_refused(pool):
    pool.run(_refuses)


def _boosted():
    reference = _build("Qwen3ForCausalLM", {**_SIZES, **_SERVED["Qwen3ForCausalLM"]}).train()
    options = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": 2}
    booster = Booster(plugin=HybridParallelPlugin(**options, num_microbatches=2, max_norm=1.0))
    model = copy.deepcopy(reference)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = torch.optim.SGD(reference.parameters(), lr=0.1)
    for left in (True, False):
        inputs = _inputs(reference, left)
        found = booster.execute_pipeline(iter([inputs]), model, None, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        wanted = reference(**inputs).loss
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        own.step()
        own.zero_grad()
        assert_close(wanted, found["loss"], "loss")
    assert_same_parameters(reference, model)


@no_float32_islands()
def test_of_a_booster_in_micro_batches(pool):
    pool.run(_boosted)


def _adapted(fields):
    reference = _build("Qwen3ForCausalLM", {**_SIZES, **_SERVED["Qwen3ForCausalLM"]})
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    reference = peft.get_peft_model(reference, adapters).double()
    sharded = shardcore.shard(copy.deepcopy(reference), **fields)
    inputs = _inputs(reference, left=True)
    losses = [model(**inputs).loss for model in (reference, sharded)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, "loss")
    assert_same_gradients(reference, sharded)


@no_float32_islands()
def test_with_adapters(pool):
    pool.run(_adapted, {"cp": 2, "context_parallel_mode": "ring_attn"})


_ADAPTERS = {
    "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True, init_lora_weights=False),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def _adapted_later(name, fields):
    base = _build("Qwen3ForCausalLM", {**_SIZES, **_SERVED["Qwen3ForCausalLM"]})
    sharded = shardcore_peft.get_peft_model(shardcore.shard(copy.deepcopy(base), **fields), _ADAPTERS[name])
    reference = peft.get_peft_model(base, _ADAPTERS[name]).double()
    own = dict(sharded.named_parameters())
    inputs = {**_inputs(reference, left=False), "use_cache": False}
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(whole(own[key]))
    for model in (reference, sharded):
        model(**inputs).loss.backward()
    for key, parameter in reference.named_parameters():
        if parameter.requires_grad:
            assert_close(
                parameter.grad, whole(own[key].grad), f"gradient of {key}", 1e-6
            )  # PEFT makes prompts in float32


@pytest.mark.parametrize("name", _ADAPTERS)
@no_float32_islands()
def test_adapters_that_come_later(pool, name):
    pool.run(_adapted_later, name, {"cp": 2})
    pool.run(_adapted_later, name, {"cp": 2, "tp": 2}, world=4)


def _embedded():
    """What is in front of a model has the gradient of all tokens on every rank."""
    for name, body in (("Qwen3ForCausalLM", "model"), ("BertForSequenceClassification", "bert")):
        reference = _build(name, {**_SIZES, **_SERVED[name]})
        sharded = shardcore.shard(copy.deepcopy(reference), cp=2)
        inputs = _inputs(reference, left=False)
        states = reference.get_input_embeddings()(inputs.pop("input_ids")).detach()
        for alone in (False, True):
            given = [states.clone().requires_grad_() for _ in range(2)]
            for model, own in zip((reference, sharded), given, strict=True):
                if alone:
                    mask = inputs["attention_mask"]
                    out = getattr(model, body)(inputs_embeds=own, attention_mask=mask)
                    out.last_hidden_state.pow(3).sum().backward()
                else:
                    model(**inputs, inputs_embeds=own).loss.backward()
            assert_close(given[0].grad, given[1].grad, f"gradient of what {name} is given")


@no_float32_islands()
def test_embeddings_that_are_given(pool):
    pool.run(_embedded)


@pytest.mark.parametrize("fields", [{"cp": 2, "tp": 2, "ep": 2}, {"cp": 4, "ep": 4}], ids=str)
@no_float32_islands()
def test_with_shared_experts(pool, fields):
    pool.run(_same, ["MixtralForCausalLM"], fields, world=4)


def _staged(name, options):
    """Logits that a part of the last stage, of which others know the form, has divided."""
    reference = _build(name, {**_SIZES, **options})
    sharded = shardcore.shard(copy.deepcopy(reference), cp=2, pp=2, num_microbatches=2)
    inputs = _inputs(reference, left=False)
    wanted = reference(**inputs).loss
    wanted.backward()
    assert_close(wanted, sharded.train_step(inputs), "loss")
    grads = {key: p.grad for key, p in reference.named_parameters(remove_duplicate=False)}
    largest = max(float(grad.abs().max()) for grad in grads.values())  # that of a key's bias is none
    for key, parameter in sharded.named_parameters():
        assert float((grads[key] - whole(parameter.grad)).abs().max()) <= 1e-12 * largest, key


@pytest.mark.skipif(not CAN_PIPELINE, reason="pipelines need torch 2.13")
@no_float32_islands()
def test_masked_words_in_stages(pool):
    pool.run(_staged, "RobertaForMaskedLM", {**_NO_DROPOUT, "pad_token_id": 0}, world=4)


@pytest.mark.skipif(not CAN_PIPELINE, reason="pipelines need torch 2.13")
@no_float32_islands()
def test_two_stacks_in_stages(pool):
    pool.run(_staged, "BartForConditionalGeneration", _TWO_STACKS, world=4)


def _generated(fields):
    """A prompt is divided, and fills the cache with the keys of all its tokens; what follows is not."""
    divided = []
    begin = ContextShard.begin

    def noted(shard, rows, tokens):
        divided.append((rows, tokens))
        return begin(shard, rows, tokens)

    for name in ("Qwen3ForCausalLM", "BartForConditionalGeneration"):  # with sliding windows; with two stacks
        reference = _build(name, {**_SIZES, **_SERVED[name]})
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(4)  # else one token follows whatever there is
        sharded = shardcore.shard(copy.deepcopy(reference), **fields)
        call = {**_inputs(reference, left=True), "max_new_tokens": 9, "pad_token_id": 0}
        call.pop("labels")
        if name.startswith("Bart"):
            call["decoder_input_ids"] = call["input_ids"][:, 20:31]
        for beams in (1, 3):
            wanted = reference.generate(**call, num_beams=beams, do_sample=False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ContextShard, "begin", noted)
                assert torch.equal(wanted, sharded.generate(**call, num_beams=beams, do_sample=False)), name
    rows = {1: 2, 3: 6}
    assert divided == [
        *((rows[beams], 37) for beams in (1, 3)),
        *((count, tokens) for beams in (1, 3) for count, tokens in ((2, 37), (rows[beams], 12))),
    ]


@pytest.mark.parametrize("fields", [{"cp": 2, "context_parallel_mode": "ring_attn"}, {"cp": 2}], ids=str)
@no_float32_islands()
def test_generation(pool, fields):
    pool.run(_generated, fields)


def _two_stacks(fields):
    """Both stacks are divided: one each of all attentions, and what the encoder captured has all tokens."""
    _same(["BartForConditionalGeneration"], fields)
    reference = _build("BartForConditionalGeneration", {**_SIZES, **_TWO_STACKS})
    sharded = shardcore.shard(copy.deepcopy(reference), **fields)
    inputs = _inputs(reference, left=False)
    inputs["labels"] = inputs["labels"][:, :23].contiguous()
    wanted, got = (model(**inputs, output_hidden_states=True) for model in (reference, sharded))
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert_close(torch.stack(wanted[name]), torch.stack(got[name]), name)
    with pytest.raises(NotSupportedError, match="use_cache=True under context parallelism"):
        sharded(**inputs, use_cache=True)


@pytest.mark.parametrize("fields", [{"cp": 3, "context_parallel_mode": "ring_attn"}, {"cp": 2, "tp": 2}], ids=str)
@no_float32_islands()
def test_two_stacks(pool, fields):
    pool.run(_two_stacks, fields, world=3 if "tp" not in fields else 4)
