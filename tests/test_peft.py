"""Adapters of PEFT on sharded models: losses, every gradient, norms and steps are those of the unsharded model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore.testing.islands import no_float32_islands
from shardcore.testing.parity import whole

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 3


@pytest.fixture(autouse=True)
def float64_throughout() -> Iterator[None]:
    with no_float32_islands():
        yield


def case_of(family: str, case: str) -> Any:
    cases = importlib.import_module(f"shard_{family}.cases").cases()
    return next(found for found in cases if found.name == case)


def base(family: str = "llama", case: str = "causal_lm", **more: Any) -> Any:
    model = case_of(family, case).build(**more).double()
    model.config.use_cache = False
    return model


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **more})


def adapted(model: Any, config: Any, seed: int = 0) -> Any:
    """Return ``model`` with adapters that do something: those that begin with zeros get values."""
    torch.manual_seed(seed)
    return shaken(peft.get_peft_model(model, config), seed)


def shaken(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("lora_", "ia3_", "modules_to_save", "prompt_encoder")):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
                if "ia3_" in name or "magnitude" in name:
                    parameter.abs_().add_(0.5)
    return model


def named(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())


def close(got: Tensor, wanted: Tensor, what: Any, bound: float = 1e-11) -> None:
    scale = max(1e-3, float(wanted.abs().max()))
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    error = float((got - wanted).abs().max()) / scale
    assert error <= bound, (what, error)


def equal_training(
    model: Any, reference: Any, inputs: Any, *, replica: int = 0, replicas: int = 1, max_norm: float = 0.05
) -> None:
    """Train both for some steps on the same batches; ``inputs(step, replica)`` makes them."""
    theirs = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    ours = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    frozen = {name: p.detach().clone() for name, p in named(reference).items() if not p.requires_grad}
    assert {n for n, p in named(model).items() if p.requires_grad} == {
        n for n, p in named(reference).items() if p.requires_grad
    }
    for step in range(STEPS):
        losses = []
        for number in range(replicas):
            losses.append(reference(**inputs(step, number)).loss)
            (losses[-1] / replicas).backward()
        loss = model(**inputs(step, replica)).loss
        close(whole(loss.detach()), losses[replica].detach(), ("loss", step))
        loss.backward()
        for name, parameter in named(reference).items():
            mine = named(model)[name]
            assert (parameter.grad is None) == (mine.grad is None), name
            if parameter.grad is not None:
                close(whole(mine.grad), parameter.grad, (name, step))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        close(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)), norm, "norm")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in named(reference).items():
        close(whole(named(model)[name].detach()), parameter.detach(), (name, "after the steps"))
        if name in frozen:
            assert torch.equal(whole(named(model)[name].detach()), frozen[name]), name


def batch(family: str, case: str, model: Any) -> Any:
    inputs = case_of(family, case).inputs
    return lambda step, replica: inputs(model, 10 * step + replica)


def trains(config: Any, options: dict[str, Any], family: str = "llama", case: str = "causal_lm", **more: Any) -> None:
    reference = adapted(base(family, case, **more), config)
    model = copy.deepcopy(reference)
    inputs = batch(family, case, reference.get_base_model())
    model = shardcore.shard(model, **options)
    replicas = options.get("dp", 1)
    equal_training(model, reference, inputs, replica=dist.get_rank() // options.get("tp", 1), replicas=replicas)


SP = {"enable_sequence_parallelism": True}
EVERY = lora(target_modules="all-linear")
UNEVEN = {"intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}

#: (settings, options of shard, family, case, options of the model)
CASES: dict[str, tuple[Any, ...]] = {
    "queries and values": (lora(target_modules=["q_proj", "v_proj"]), {"tp": 2}),
    "every linear": (lora(), {"tp": 2}),
    "sequence": (lora(), {"tp": 2, **SP}),
    "data": (lora(), {"tp": 2, "dp": 2}),
    "data alone": (lora(), {"tp": 1, "dp": 2}),
    "data and sequence": (lora(), {"tp": 2, "dp": 2, **SP}),
    "shared KV heads": (lora(), {"tp": 4}, "llama", "tied_shared_kv"),
    "uneven parts": (lora(), {"tp": 3}, "llama", "causal_lm", UNEVEN),
    "the head": (lora(target_modules=["q_proj", "lm_head"]), {"tp": 2}),
    "the head, split": (lora(target_modules=["q_proj", "lm_head"]), {"tp": 2, "parallel_output": True}),
    "the embedding": (lora(target_modules=["embed_tokens", "q_proj"]), {"tp": 2, **SP}),
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


@pytest.mark.parametrize("name", CASES)
def test_before(pool, name):
    config, options, *rest = CASES[name]
    more = rest.pop() if len(rest) > 2 else {}
    pool.run(trains, config, options, *rest, **more, world=options["tp"] * options.get("dp", 1))


def attached_after(config: Any, options: dict[str, Any], how: str, family: str, case: str, **more: Any) -> Any:
    """Return (sharded model with adapters, reference): the adapters come after `shard`, with the reference's values."""
    if how == "get_peft_model":
        reference = adapted(base(family, case, **more), config)
        model = shardcore.shard(base(family, case, **more), **options)
        torch.manual_seed(dist.get_rank())  # ranks need not draw alike
        model = peft_room().get_peft_model(model, copy.deepcopy(config))
    else:
        reference, model = base(family, case, **more), shardcore.shard(base(family, case, **more), **options)
        reference.add_adapter(config)
        shaken(reference)
        torch.manual_seed(dist.get_rank())
        model.add_adapter(copy.deepcopy(config))
    for name, parameter in named(model).items():
        assert name in named(reference), name
        assert torch.equal(first := whole(parameter.detach()), broadcast(first)), name
    state = {name: value for name, value in reference.state_dict().items() if named(reference)[name].requires_grad}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model, reference


def broadcast(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.broadcast(tensor, 0)
    return tensor


def peft_room() -> Any:
    return importlib.import_module("shardcore.integrations.peft")


def trains_after(
    config: Any, options: dict[str, Any], how: str, family: str = "llama", case: str = "causal_lm", **more: Any
) -> None:
    model, reference = attached_after(config, options, how, family, case, **more)
    inner = reference.get_base_model() if how == "get_peft_model" else reference
    equal_training(model, reference, batch(family, case, inner))


@pytest.mark.parametrize("how", ["get_peft_model", "add_adapter"])
def test_lora_after(pool, how):
    pool.run(trains_after, lora(), {"tp": 2}, how, world=2)
