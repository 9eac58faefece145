"""What the tests of adapters share: small models with and without them, and one comparison of their training."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore_testing.parity import whole

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = 3


def case_of(family: str, case: str) -> Any:
    cases = importlib.import_module(f"shard_{family}.cases").cases()
    return next(found for found in cases if found.name == case)


def base(family: str = "llama", case: str = "causal_lm", **more: Any) -> Any:
    model = case_of(family, case).build(**more).double()
    model.config.use_cache = False
    return model


def lora(**more: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LINEARS, **more})


def ia3(targets: list[str], of_inputs: list[str]) -> Any:
    return peft.IA3Config(target_modules=targets, feedforward_modules=of_inputs)


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


def leave_nothing_to_chance(model: Any) -> None:
    """Let the dropouts of adapters keep what is positive, which is the same on any number of ranks."""
    for name, module in model.named_modules():
        if "lora_dropout" in name and isinstance(module, torch.nn.Dropout):
            module.forward = torch.relu


def trains(config: Any, options: dict[str, Any], family: str = "llama", case: str = "causal_lm", **more: Any) -> None:
    reference = adapted(base(family, case, **more), config)
    model = copy.deepcopy(reference)
    inputs = batch(family, case, reference.get_base_model())
    model = shardcore.shard(model, **options)
    for one in (model, reference):
        leave_nothing_to_chance(one)
    replicas = options.get("dp", 1)
    equal_training(model, reference, inputs, replica=dist.get_rank() // options.get("tp", 1), replicas=replicas)


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
    state = {name: p.detach() for name, p in named(reference).items() if p.requires_grad}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model, reference


def broadcast(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.broadcast(tensor, 0)
    return tensor


def peft_room() -> Any:
    return importlib.import_module("shardcore_peft")


def trains_after(
    config: Any, options: dict[str, Any], how: str, family: str = "llama", case: str = "causal_lm", **more: Any
) -> None:
    model, reference = attached_after(config, options, how, family, case, **more)
    for one in (model, reference):
        leave_nothing_to_chance(one)
    inner = reference.get_base_model() if how == "get_peft_model" else reference
    place = {"replica": dist.get_rank() // options["tp"], "replicas": options.get("dp", 1)}
    equal_training(model, reference, batch(family, case, inner), **place)


def outputs(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return whole(model.eval()(**inputs(0, 0)).logits)


SP = {"enable_sequence_parallelism": True}
EVERY = lora(target_modules="all-linear")
UNEVEN = {"intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
