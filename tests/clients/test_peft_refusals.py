"""What adapters of sharded models cannot be is said before anything is changed, on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import peft
from packaging.version import Version

from adapters import (  # from support/
    adapted,
    base,
    batch,
    close,
    equal_training,
    ia3,
    lora,
    peft_room,
)

pytestmark = pytest.mark.usefixtures("float64_throughout")


def refused(config: Any, options: dict[str, Any], error: str, words: str, when: str = "before", *of: str) -> None:
    """A refusal leaves the model as it was: it trains unsharded, or is sharded without the adapter."""
    kind = getattr(shardcore, error)
    of = of or ("llama", "causal_lm")
    if when == "before":
        model = adapted(base(*of), config)
        inputs = batch(*of, base(*of))(0, 0)
        wanted = model(**inputs).loss
        with pytest.raises(kind, match=words):
            shardcore.shard(model, **options)
        assert torch.equal(model(**inputs).loss, wanted)
        return
    model = shardcore.shard(base(*of), **options)
    with pytest.raises(kind, match=words):
        peft_room().get_peft_model(model, config)
    inputs = batch(*of, base(*of))(0, 0)
    close(model(**inputs).loss.detach(), base(*of)(**inputs).loss.detach(), "the model goes on")


GPT2 = ("gpt2", "causal_lm")
TIED = ("llama", "tied_shared_kv")

REFUSED = {
    "an encoder of prompts that is an LSTM, and a head": (
        peft.PromptEncoderConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=3,
            modules_to_save=["lm_head"],
            encoder_reparameterization_type="LSTM",
        ),
        {"tp": 2},
        "NotSupportedError",
        "those of an LSTM have to be",
    ),
    "later, prompts and a head": (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, modules_to_save=["lm_head"]),
        {"tp": 2},
        "NotSupportedError",
        "attach it before shard",
        "after",
    ),
    "later, deferred gradients of replicas": (
        lora(),
        {"tp": 2, "dp": 2, "partial_gradients": "deferred"},
        "NotSupportedError",
        "deferred.*Attach it before shard",
        "after",
    ),
    "another method": (peft.LoHaConfig(target_modules=["q_proj"]), {"tp": 2}, "NotSupportedError", "is LOHA"),
    "a pipeline": (lora(), {"pp": 2}, "NotSupportedError", "divided among the ranks of a pipeline"),
    "later, of values": (lora(init_lora_weights="pissa"), {"tp": 2}, "NotSupportedError", "computes of whole", "after"),
    "later, a variant": (
        lora(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"),
        {"tp": 2},
        "NotSupportedError",
        "has alora_invocation_tokens",
        "after",
    ),
    "later, another method with data alone": (
        peft.LNTuningConfig(target_modules=["norm"]),
        {"tp": 1, "dp": 2},
        "NotSupportedError",
        "is LN_TUNING, which may begin with values of the base: attach it before",
        "after",
    ),
    "later, layers twice": (
        lora(layer_replication=[(0, 2), (0, 2)]),
        {"tp": 2},
        "NotSupportedError",
        "layer_replication=.*attach it before",
        "after",
    ),
    "layers twice, data": (
        lora(layer_replication=[(0, 2), (0, 2)]),
        {"tp": 1, "dp": 2},
        "NotSupportedError",
        "layer_replication=.*tensor parallelism alone",
    ),
    "rows of a table, data": (
        lora(trainable_token_indices=[3, 4]),
        {"tp": 1, "dp": 2},
        "NotSupportedError",
        "trainable_token_indices",
    ),
    "a method around the model": (
        peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
        {"tp": 2},
        "NotSupportedError",
        r"of this kind \(ADAPTION_PROMPT, a AdaptionPromptModel\)",
    ),
    "later, a part of what is divided": (
        lora(modules_to_save=["lm_head"]),
        {"tp": 2, "dp": 2},
        "NotSupportedError",
        "Attach it before shard",
        "after",
    ),
}


#: What has no form at the modules that it names, in the same words before and after: (settings, words, model)
WHERE = {
    "scales of a fused linear": (
        peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True),
        r"output of transformer\.h\.0\.attn\.c_attn",
        *GPT2,
    ),
    "scales where PEFT knows": (
        peft.IA3Config(fan_in_fan_out=True),
        r"output of transformer\.h\.0\.attn\.c_attn",
        *GPT2,
    ),
    "scales of heads of several ranks": (ia3(["k_proj"], []), "output of .*k_proj", *TIED),
    "scales of a head": (ia3(["lm_head"], []), "output of lm_head"),
    "a copy of a region": (
        lora(target_modules=["v_proj"], modules_to_save=["mlp"]),
        r"layers\.0\.mlp, whose .* is split",
    ),
    "copies of its linears": (
        lora(target_modules=["v_proj"], modules_to_save=["q_proj", "o_proj"]),
        "q_proj, whose weight is split",
    ),
    "rows of a table": (lora(trainable_token_indices=[3, 4]), "trainable_token_indices.*Leave it out"),
    "tied adapters": (
        lora(target_modules=["q_proj", "lm_head"], ensure_weight_tying=True),
        "ensure_weight_tying=True with LoRA of tied modules",
        *TIED,
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", WHERE)
def test_refused_where_it_is(pool, name, when):
    if (name, when) == ("tied adapters", "before") and Version(peft.__version__) < Version("0.19"):
        pytest.skip("PEFT 0.18 ties copies alone, and says so")
    config, words, *of = WHERE[name]
    tp = 4 if name == "scales of heads of several ranks" else 2
    pool.run(refused, config, {"tp": tp}, "NotSupportedError", words, when, *of, world=tp)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    _, options, *_ = REFUSED[name]
    pool.run(refused, *REFUSED[name], world=options.get("tp", 2) * options.get("dp", 1))


def of_several_methods() -> None:
    model = peft.get_peft_model(base(), lora(), mixed=True)
    with pytest.raises(shardcore.NotSupportedError, match=r"PeftMixedModel cannot be sharded.*without mixed=True"):
        shardcore.shard(model, tp=2)


def test_mixed_models_are_refused(pool):
    pool.run(of_several_methods, world=2)


def attaches_by_itself() -> None:
    model = shardcore.shard(base(), tp=2)
    with pytest.raises(shardcore.WrapError, match=r"shardcore_peft\.get_peft_model"):
        peft.get_peft_model(model, lora())
    inputs = batch("llama", "causal_lm", base())(0, 0)
    with pytest.raises(shardcore.WrapError, match=r"shardcore_peft\.get_peft_model"):
        model(**inputs)
    data = shardcore.shard(base(), tp=1, dp=2)
    with pytest.raises(shardcore.WrapError, match=r"shardcore_peft\.get_peft_model"):
        peft.get_peft_model(data, lora())(**inputs)


def test_what_peft_does_by_itself_is_refused(pool):
    pool.run(attaches_by_itself, world=2)


def differs_between_ranks() -> None:
    with pytest.raises(shardcore.AgreementError, match="lora_A"):
        shardcore.shard(adapted(base(), lora(), seed=dist.get_rank()), tp=2)
    model = shardcore.shard(base(), tp=2)
    with pytest.raises(shardcore.ShardcoreError, match="the parameter"):
        peft_room().get_peft_model(model, lora(r=2 + dist.get_rank()))
    reference = adapted(base(), lora())
    model = shardcore.shard(adapted(base(), lora(), seed=dist.get_rank()), tp=2, sync_from=0)
    equal_training(model, reference, batch("llama", "causal_lm", base()))


def test_ranks_that_differ(pool):
    pool.run(differs_between_ranks, world=2)


def of_experts(when: str, more: dict[str, Any]) -> None:
    """Adapters of experts are refused before anything is changed; without them the model goes on."""
    model = ("qwen", "qwen3moe_causal_lm")
    one = base(*model)
    listed = not hasattr(one.model.layers[0].mlp.experts, "gate_up_proj")
    if listed:  # each expert is a module
        settings = lora(target_modules=["q_proj", "down_proj"])
        words = r"experts\.0\.down_proj.*Leave it out of target_modules"
    else:
        settings = lora(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
        words = "target_parameters adapts weights.*Leave it out"
    inputs = batch(*model, one)(0, 0)
    if when == "before":
        adapted_one = adapted(one, settings)
        wanted = adapted_one(**inputs).loss
        with pytest.raises(shardcore.NotSupportedError, match=words):
            shardcore.shard(adapted_one, **more)
        assert torch.equal(adapted_one(**inputs).loss, wanted)
        return
    sharded = shardcore.shard(one, **more)
    with pytest.raises(shardcore.NotSupportedError, match=words):
        peft_room().get_peft_model(sharded, settings)
    close(sharded(**inputs).loss.detach(), base(*model)(**inputs).loss.detach(), "the model goes on")


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_of_experts(pool, when):
    pool.run(of_experts, when, {"tp": 2}, world=2)
