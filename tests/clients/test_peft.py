"""Adapters of PEFT on sharded models: losses, every gradient, norms and steps are those of the unsharded model."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore_testing.parity import equal_on_ranks, whole

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from adapters import (  # from support/
    EVERY,
    LINEARS,
    SP,
    UNEVEN,
    adapted,
    attached_after,
    base,
    batch,
    close,
    equal_training,
    ia3,
    lora,
    named,
    trains,
    trains_after,
)
from stacks import ADAPTERS, by_night

pytestmark = pytest.mark.usefixtures("float64_throughout")


#: (settings, options of shard, family, case, options of the model)
CASES: dict[str, tuple[Any, ...]] = {
    "queries and values": (lora(target_modules=["q_proj", "v_proj"]), {"tp": 2}),
    "every linear": (lora(), {"tp": 2}),
    "sequence": (lora(), {"tp": 2, **SP}),
    "data": (lora(), {"tp": 2, "dp": 2}),
    "data alone": (lora(), {"tp": 1, "dp": 2}),
    "data alone, beside the blocks": (
        lora(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"]),
        {"tp": 1, "dp": 2},
    ),
    "data and sequence": (lora(), {"tp": 2, "dp": 2, **SP}),
    "shared KV heads": (lora(), {"tp": 4}, "llama", "tied_shared_kv"),
    "uneven parts": (lora(), {"tp": 3}, "llama", "causal_lm", UNEVEN),
    "the head": (lora(target_modules=["q_proj", "lm_head"]), {"tp": 2}),
    "the head, split": (lora(target_modules=["q_proj", "lm_head"]), {"tp": 2, "parallel_output": True}),
    "the head, sequence": (lora(target_modules=["q_proj", "lm_head"]), {"tp": 2, "parallel_output": True, **SP}),
    "the embedding": (lora(target_modules=["embed_tokens", "q_proj"]), {"tp": 2, **SP}),
    "the embedding and the head trained": (
        lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"]),
        {"tp": 2, **SP},
    ),
    "the head trained, split": (
        lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        {"tp": 2, "parallel_output": True},
    ),
    "a classifier trained": (
        lora(target_modules=["query", "value"], modules_to_save=["classifier"]),
        {"tp": 2, "dp": 2},
        "bert",
        "sequence_classification",
    ),
    "scales": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2}),
    "scales, sequence": (ia3(["k_proj", "o_proj", "up_proj", "down_proj"], ["up_proj"]), {"tp": 2, **SP}),
    "scales, data": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2, "dp": 2}),
    "scales in bert": (ia3(["query", "value", "dense"], ["dense"]), {"tp": 2, **SP}, "bert", "masked_lm"),
    "a tied table, trained": (
        lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True),
        {"tp": 2, **SP},
        "llama",
        "tied_shared_kv",
    ),
    "a tied table, trained, data": (
        lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        {"tp": 2, "dp": 2},
        "llama",
        "tied_shared_kv",
    ),
    "rank patterns": (
        lora(rank_pattern={"q_proj": 2, "down_proj": 7}, alpha_pattern={"v_proj": 3}, use_rslora=True),
        {"tp": 2},
    ),
    "bert": (EVERY, {"tp": 2}, "bert", "masked_lm"),
    "bert, sequence": (EVERY, {"tp": 2, **SP}, "bert", "masked_lm"),
    "biases": (lora(lora_bias=True, target_modules=["query", "dense"]), {"tp": 2, **SP}, "bert", "masked_lm"),
    "biases of the base": (lora(bias="lora_only", target_modules=["query", "dense"]), {"tp": 2}, "bert", "masked_lm"),
    "vit": (EVERY, {"tp": 2}, "vit", "image_classification"),
    "whisper": (
        lora(target_modules=["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]),
        {"tp": 2},
        "whisper",
        "speech_to_text",
    ),
    "phi, fused": (EVERY, {"tp": 2}, "phi", "phi3_causal_lm"),
    "neox, fused": (EVERY, {"tp": 2}, "gpt_neo", "GPTNeoXForCausalLM"),
    "gpt2, transposed": (lora(target_modules="all-linear", fan_in_fan_out=True), {"tp": 2}, "gpt2", "causal_lm"),
}


QUICK = {
    "sequence", "data alone", "a tied table, trained", "bert", "gpt2, transposed",
}  # fmt: skip


@pytest.mark.parametrize("name", by_night(CASES, but=QUICK))
def test_before(pool, name):
    config, options, *rest = CASES[name]
    if rest:
        pytest.importorskip(f"shard_{rest[0]}", reason="the pack does not serve this release of transformers")
    more = rest.pop() if len(rest) > 2 else {}
    pool.run(trains, config, options, *rest, **more, world=options["tp"] * options.get("dp", 1))


def trains_experts() -> None:
    """Replicas alone train adapters of all experts, in whichever form a release of transformers has these."""
    of = ("qwen", "qwen3moe_causal_lm")
    stacked = hasattr(base(*of).model.layers[0].mlp.experts, "gate_up_proj")
    targets = {"target_modules": ["q_proj"] if stacked else ["q_proj", "gate_proj", "down_proj"]}
    if stacked:
        targets["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    trains(lora(**targets), {"tp": 1, "dp": 2}, *of)


def test_adapters_of_experts_on_replicas(pool):
    pool.run(trains_experts, world=2)


WHOLE = {"dp_shard_size": 1, "dp_replicate_size": 2}

AFTER = {
    "every linear": (lora(), {"tp": 2}),
    "sequence": (lora(), {"tp": 2, **SP}),
    "shared KV heads": (lora(), {"tp": 4}, "llama", "tied_shared_kv"),
    "the embedding": (lora(target_modules=["embed_tokens", "q_proj"]), {"tp": 2}),
    "the head trained": (lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), {"tp": 2}),
    "scales": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2}),
    "neox, fused": (EVERY, {"tp": 2}, "gpt_neo", "GPTNeoXForCausalLM"),
    "a tied table, trained": (
        lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        {"tp": 2, **SP},
        "llama",
        "tied_shared_kv",
    ),
    "data": (lora(lora_dropout=0.5), {"tp": 2, "dp": 2, **SP}),
    "data alone": (lora(target_modules=[*LINEARS, "embed_tokens"], bias="none", use_dora=True), {"tp": 1, "dp": 2}),
    "whole replicas": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 1, "dp": 2, **WHOLE}),
    "whole replicas, magnitudes": (lora(use_dora=True), {"tp": 2, "dp": 2, **WHOLE}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["get_peft_model", pytest.param("add_adapter", marks=ADAPTERS)])
@pytest.mark.parametrize("name", AFTER)
def test_after(pool, name, how):
    config, options, *rest = AFTER[name]
    pool.run(trains_after, config, options, how, *rest, world=options["tp"] * options.get("dp", 1))


def recomputes(options: dict[str, Any], reentrant: bool) -> None:
    reference = adapted(base(), lora())
    model = copy.deepcopy(reference)
    for one in (reference, model):
        one.enable_input_require_grads()
        prefix = "activation" if hasattr(one, "activation_checkpointing_enable") else "gradient"
        getattr(one, f"{prefix}_checkpointing_enable")({"use_reentrant": reentrant})
        one.train()
    equal_training(
        shardcore.shard(model, **options), reference, batch("llama", "causal_lm", reference.get_base_model())
    )


@pytest.mark.nightly
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, **SP}], ids=["tp", "sequence"])
def test_gradient_checkpointing(pool, options, reentrant):
    pool.run(recomputes, options, reentrant, world=2)


def in_half_precision(options: dict[str, Any]) -> None:
    """The base is bfloat16 and stays as it is, bit by bit; PEFT keeps adapters in float32."""
    reference = adapted(base().bfloat16(), lora())
    model = shardcore.shard(copy.deepcopy(reference), **options)
    dtypes = {name: p.dtype for name, p in named(reference).items()}
    assert {name: p.dtype for name, p in named(model).items()} == dtypes
    assert {d for n, d in dtypes.items() if "lora_" in n} == {torch.float32}
    inputs = batch("llama", "causal_lm", reference.get_base_model())
    before = {name: p.detach().clone() for name, p in named(reference).items() if not p.requires_grad}
    truth = copy.deepcopy(reference).double()
    replica, replicas = dist.get_rank() // options["tp"], options.get("dp", 1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for one in (reference, truth):
        for number in range(replicas):
            (one(**inputs(0, number)).loss / replicas).backward()
    model(**inputs(0, replica)).loss.backward()
    errors = dict.fromkeys(("sharded", "unsharded", "size"), 0.0)
    for name, parameter in named(truth).items():
        if parameter.grad is not None:
            errors["sharded"] += float((whole(named(model)[name].grad) - parameter.grad).square().sum())
            errors["unsharded"] += float((named(reference)[name].grad - parameter.grad).square().sum())
            errors["size"] += float(parameter.grad.square().sum())
    assert errors["sharded"] <= 4 * errors["unsharded"] <= 1e-2 * errors["size"], errors
    optimizer.step()
    for name, value in before.items():
        assert torch.equal(whole(named(model)[name].detach()), value), name


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, **SP}, {"tp": 2, "dp": 2}], ids=["tp", "sequence", "data"])
def test_a_base_in_half_precision(pool, options):
    pool.run(in_half_precision, options, world=2 * options.get("dp", 1))


def drops_out(options: dict[str, Any]) -> None:
    config = lora(lora_dropout=0.5)
    model = shardcore.shard(adapted(base(), config), **options).train()
    inputs = batch("llama", "causal_lm", model.get_base_model())
    masks: dict[str, list[Tensor]] = {}

    def note(name: str) -> Any:
        return lambda module, args, out: masks.setdefault(name, []).append((out == 0)[args[0] != 0])

    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            module.register_forward_hook(note(name))
    losses = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())  # however ranks are seeded
        shardcore.manual_seed(model, 7)
        losses.append(model(**inputs(0, 0)).loss)
    assert torch.equal(*losses), "the same seed, the same masks"
    losses.append(model(**inputs(0, 0)).loss)
    assert not torch.equal(losses[0], losses[2])
    losses[2].backward()
    for name, found in masks.items():
        assert torch.equal(found[0], found[1])
        alike = equal_on_ranks(found[2])
        assert alike == ("o_proj" not in name and "down_proj" not in name), name
    drawn = torch.cat([mask for found in masks.values() for mask in found]).double()
    assert abs(float(drawn.mean()) - 0.5) < 5 / (2 * drawn.numel() ** 0.5)
    for name, parameter in named(model).items():
        if parameter.requires_grad and parameter.grad is not None and "lora_A" in name and "q_proj" in name:
            assert equal_on_ranks(whole(parameter.grad)), name


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, **SP}], ids=["tp", "sequence"])
def test_dropout(pool, options):
    pool.run(drops_out, options, world=2)


def steps_a_given_optimizer() -> None:
    reference = adapted(base(), lora())
    model = copy.deepcopy(reference)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (reference, model)]
    shardcore.shard(model, tp=2, optimizer=optimizers[1])
    inputs = batch("llama", "causal_lm", base())(0, 0)
    for one, optimizer in zip((reference, model), optimizers, strict=True):
        one(**inputs).loss.backward()
        optimizer.step()
    for name, parameter in named(reference).items():
        close(whole(named(model)[name].detach()), parameter.detach(), name)


def test_an_optimizer_that_was_made_before(pool):
    pool.run(steps_a_given_optimizer, world=2)


def defers(config: Any, options: dict[str, Any], when: str, case: str = "causal_lm") -> None:
    """Gradients of two batches that ranks, and replicas, sum once are those of the unsharded model."""
    if when == "before":
        reference = adapted(base("llama", case), config)
        model = shardcore.shard(copy.deepcopy(reference), **options)
    else:
        model, reference = attached_after(config, options, "get_peft_model", "llama", case)
    inputs = batch("llama", case, reference.get_base_model())
    replica, replicas = dist.get_rank() // options["tp"], options.get("dp", 1)
    for step in range(2):
        for number in range(replicas):
            (reference(**inputs(step, number)).loss / replicas).backward()
        if replicas > 1:
            model.set_requires_gradient_sync(step == 1)
        model(**inputs(step, replica)).loss.backward()
    if "partial_gradients" in options:
        # FSDP2 adds what is partial before it averages.
        assert replicas > 1 or any(map(is_partial, model.parameters())), "nothing is summed later"
        shardcore.reduce_partial_gradients(model)
    assert not any(map(is_partial, model.parameters()))
    for name, parameter in named(reference).items():
        if parameter.grad is not None:
            close(whole(named(model)[name].grad), parameter.grad, name)


def is_partial(parameter: Any) -> bool:
    return parameter.grad is not None and any(placement.is_partial() for placement in parameter.grad.placements)


LATER = {"partial_gradients": "deferred"}
DEFERRED = {
    "every linear": (lora(), {"tp": 2, **LATER}, "before"),
    "attached later": (lora(), {"tp": 2, **LATER}, "after"),
    "shared KV heads, magnitudes": (lora(use_dora=True), {"tp": 4, **LATER}, "before", "tied_shared_kv"),
    "sequence": (lora(use_dora=True), {"tp": 2, **SP, **LATER}, "before"),
    "data": (lora(), {"tp": 2, "dp": 2, **LATER}, "before"),
    "data and sequence": (lora(modules_to_save=["norm"]), {"tp": 2, "dp": 2, **SP, **LATER}, "before"),
    "scales, data": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2, "dp": 2, **LATER}, "before"),
    "summed at once, data": (lora(), {"tp": 2, "dp": 2}, "before"),
    "summed at once, attached later to data": (lora(), {"tp": 2, "dp": 2}, "after"),
}


@pytest.mark.parametrize("name", DEFERRED)
def test_deferred_gradients(pool, name):
    config, options, *rest = DEFERRED[name]
    pool.run(defers, config, options, *rest, world=options["tp"] * options.get("dp", 1))
