"""Adapters of PEFT on sharded models: losses, every gradient, norms and steps are those of the unsharded model."""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore.testing.islands import no_float32_islands
from shardcore.testing.parity import equal_on_ranks, whole

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
    state = {name: p.detach() for name, p in named(reference).items() if p.requires_grad}
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


AFTER = {
    "every linear": (lora(), {"tp": 2}),
    "sequence": (lora(), {"tp": 2, **SP}),
    "shared KV heads": (lora(), {"tp": 4}, "llama", "tied_shared_kv"),
    "the embedding": (lora(target_modules=["embed_tokens", "q_proj"]), {"tp": 2}),
    "the head trained": (lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), {"tp": 2}),
    "scales": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2}),
    "neox, fused": (EVERY, {"tp": 2}, "gpt_neo", "GPTNeoXForCausalLM"),
}


@pytest.mark.parametrize("how", ["get_peft_model", "add_adapter"])
@pytest.mark.parametrize("name", AFTER)
def test_after(pool, name, how):
    config, options, *rest = AFTER[name]
    pool.run(trains_after, config, options, how, *rest, world=options["tp"])


def files(folder: Path) -> dict[str, Any]:
    return read_file(folder / "adapter_model.safetensors")


def read_tensors(folder: Path) -> dict[str, Any]:
    return read_file(folder / "model.safetensors")


def read_file(path: Path) -> dict[str, Any]:
    return importlib.import_module("safetensors.torch").load_file(path)


def outputs(model: Any, inputs: Any) -> Tensor:
    with torch.no_grad():
        return whole(model.eval()(**inputs(0, 0)).logits)


def saves_and_loads(folder: str, options: dict[str, Any], how: str) -> None:
    """Save on several ranks and load in one process, and the other way round; two adapters, switched and merged."""
    place = Path(folder)
    inputs = batch("llama", "causal_lm", base())
    reference = adapted(base(), lora())
    reference.add_adapter("other", lora(r=2, target_modules=["v_proj", "down_proj"]))
    shaken(reference, 1)
    if how == "before":
        model = shardcore.shard(copy.deepcopy(reference), **options)
    else:
        model = peft_room().get_peft_model(shardcore.shard(base(), **options), lora())
        model.add_adapter("other", lora(r=2, target_modules=["v_proj", "down_proj"]))
        model.load_state_dict({k: v for k, v in reference.state_dict().items() if "lora_" in k}, strict=False)
    model.save_pretrained(place / "ours")
    if dist.get_rank() == 0:
        reference.save_pretrained(place / "theirs")
    dist.barrier()
    for name in ("", "other"):
        ours, theirs = files(place / "ours" / name), files(place / "theirs" / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        configs = [json.loads((place / at / name / "adapter_config.json").read_text()) for at in ("ours", "theirs")]
        for config in configs:
            config["target_modules"].sort()
        assert configs[0] == configs[1], configs
    for name in ("default", "other"):
        for one in (model, reference):
            one.set_adapter(name)
        close(outputs(model, inputs), outputs(reference, inputs), name)
    with model.disable_adapter():
        close(outputs(model, inputs), outputs(base(), inputs), "switched off")
    plain = peft.PeftModel.from_pretrained(base(), place / "ours")  # one process reads what several have written
    plain.load_adapter(place / "ours" / "other", "other")
    again = model
    if "dp" not in options:
        again = peft_room().from_pretrained(shardcore.shard(base(), **options), place / "theirs")
    if again is not model:
        again.load_adapter(place / "theirs" / "other", "other")
    for name in ("default", "other"):
        for one in (plain, again, reference):
            one.set_adapter(name)
        close(outputs(plain, inputs), outputs(reference, inputs), ("saved", name))
        close(outputs(again, inputs), outputs(reference, inputs), ("loaded", name))
    model.set_adapter("default")
    model.delete_adapter("other")
    reference.set_adapter("default")
    wanted = outputs(reference, inputs)
    model.merge_adapter()
    close(outputs(model, inputs), wanted, "merged", 1e-9)
    model.unmerge_adapter()
    close(outputs(model, inputs), wanted, "unmerged", 1e-9)
    merged = model.merge_and_unload()
    close(outputs(merged, inputs), wanted, "merged and unloaded", 1e-9)
    merged.save_pretrained(place / "merged")
    dist.barrier()
    whole_model = base()
    whole_model.load_state_dict(read_tensors(place / "merged"))
    close(outputs(whole_model, inputs), wanted, "merged and saved", 1e-9)
    if again is not model:
        bare = again.unload()
        close(outputs(bare, inputs), outputs(base(), inputs), "unloaded")


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "dp": 2}], ids=["tp", "tp and dp"])
def test_saving(pool, tmp_path, options, how):
    if how == "after" and "dp" in options:
        pytest.skip("adapters of a model with replicas are attached before shard()")
    pool.run(saves_and_loads, str(tmp_path), options, how, world=2 * options.get("dp", 1))


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


def trains_prompts(config: Any, when: str, options: dict[str, Any]) -> None:
    reference = adapted(base(), config)
    if when == "before":
        model = shardcore.shard(copy.deepcopy(reference), **options)
    else:
        torch.manual_seed(dist.get_rank())
        model = peft_room().get_peft_model(shardcore.shard(base(), **options), config)
        assert equal_on_ranks(model.prompt_encoder.default.embedding.weight)
        model.prompt_encoder.load_state_dict(reference.prompt_encoder.state_dict())
    equal_training(model, reference, batch("llama", "causal_lm", base()))


PROMPTS = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=8),
}


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, **SP}], ids=["tp", "sequence"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(pool, name, when, options):
    pool.run(trains_prompts, PROMPTS[name], when, options, world=2)


def merges(config: Any, options: dict[str, Any], safely: bool, family: str, case: str) -> None:
    """Merged weights are those of the unsharded model, and what is trained beside the adapters is saved and loaded."""
    reference = adapted(base(family, case), config)
    model = shardcore.shard(copy.deepcopy(reference), **options)
    for one in (reference, model):
        one.merge_adapter(safe_merge=safely)
    for name, parameter in named(reference).items():
        close(whole(named(model)[name].detach()), parameter.detach(), ("merged", name))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        merged, wanted = model.merge_and_unload(), reference.merge_and_unload()
    inputs = batch(family, case, wanted)
    close(outputs(merged, inputs), outputs(wanted, inputs), "merged and unloaded")
    loss = merged.requires_grad_(True)(**inputs(0, 0)).loss
    loss.backward()
    wanted.requires_grad_(True)(**inputs(0, 0)).loss.backward()
    for name, parameter in named(wanted).items():
        if parameter.grad is not None:
            close(whole(named(merged)[name].grad), parameter.grad, ("trained on", name), 1e-9)


MERGED = {
    "LoRA": (lora(), {"tp": 2}, "llama", "tied_shared_kv"),
    "scales": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2}, "llama", "causal_lm"),
    "a head": (lora(modules_to_save=["lm_head"]), {"tp": 2, **SP}, "llama", "causal_lm"),
    "fused": (EVERY, {"tp": 2}, "gpt_neo", "GPTNeoXForCausalLM"),
    "transposed": (lora(target_modules="all-linear", fan_in_fan_out=True), {"tp": 2}, "gpt2", "causal_lm"),
}


@pytest.mark.parametrize("safely", [False, True])
@pytest.mark.parametrize("name", MERGED)
def test_merging(pool, name, safely):
    config, options, *model = MERGED[name]
    pool.run(merges, config, options, safely, *model, world=2)


def refused(config: Any, options: dict[str, Any], error: str, words: str, when: str = "before") -> None:
    """A refusal leaves the model as it was: it trains unsharded, or is sharded without the adapter."""
    kind = getattr(shardcore, error)
    if when == "before":
        model = adapted(base(), config)
        inputs = batch("llama", "causal_lm", base())(0, 0)
        wanted = model(**inputs).loss
        with pytest.raises(kind, match=words):
            shardcore.shard(model, **options)
        assert torch.equal(model(**inputs).loss, wanted)
        return
    model = shardcore.shard(base(), **options)
    with pytest.raises(kind, match=words):
        peft_room().get_peft_model(model, config)
    inputs = batch("llama", "causal_lm", base())(0, 0)
    close(model(**inputs).loss.detach(), base()(**inputs).loss.detach(), "the model goes on")


REFUSED = {
    "DoRA": (lora(use_dora=True), {"tp": 2}, "NotSupportedError", "q_proj uses DoraLinearVariant"),
    "prefixes": (
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        {"tp": 2},
        "NotSupportedError",
        "keys and values of all heads",
    ),
    "prompts and replicas": (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        {"tp": 2, "dp": 2},
        "NotSupportedError",
        "2 data-parallel replicas",
    ),
    "another method": (peft.LoHaConfig(target_modules=["q_proj"]), {"tp": 2}, "NotSupportedError", "is LOHA"),
    "a pipeline": (lora(), {"pp": 2}, "NotSupportedError", "divided among the ranks of a pipeline"),
    "later, of values": (lora(init_lora_weights="pissa"), {"tp": 2}, "NotSupportedError", "computes of whole", "after"),
    "later, DoRA": (lora(use_dora=True), {"tp": 2}, "NotSupportedError", "DoRA", "after"),
    "later, replicas": (lora(), {"tp": 2, "dp": 2}, "NotSupportedError", "Attach adapters before shard", "after"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    _, options, *_ = REFUSED[name]
    pool.run(refused, *REFUSED[name], world=options.get("tp", 2) * options.get("dp", 1))


def generates() -> None:
    """Both ways of attaching generate what the unsharded model does; a copy is a model of its own."""
    reference = adapted(base(), lora(task_type="CAUSAL_LM"))
    model = shardcore.shard(copy.deepcopy(reference), tp=2)
    ids = batch("llama", "causal_lm", base())(0, 0)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    wanted = reference.eval().generate(input_ids=ids, **settings)
    assert torch.equal(model.eval().generate(input_ids=ids, **settings), wanted)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in named(other).items():
            if "lora_B" in name:
                parameter.zero_()
    assert torch.equal(model.generate(input_ids=ids, **settings), wanted)
    plain = base().eval().generate(input_ids=ids, **settings)
    assert torch.equal(other.generate(input_ids=ids, **settings), plain)


def test_generation(pool):
    pool.run(generates, world=2)


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


def resumes(folder: str) -> None:
    """A training checkpoint of the model with adapters goes on where it was, dropout included."""

    def made() -> tuple[Any, Any]:
        model = shardcore.shard(adapted(base(), lora(lora_dropout=0.2)), tp=2).train()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(model: Any, optimizer: Any, number: int) -> Tensor:
        loss = model(**batch("llama", "causal_lm", base())(number, 0)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer = made()
    shardcore.manual_seed(model, 3)
    step(model, optimizer, 0)
    where = shardcore.save_checkpoint(folder, model, optimizer, step=1)
    wanted = [step(model, optimizer, number) for number in (1, 2)]
    model, optimizer = made()
    shardcore.load_checkpoint(where, model, optimizer)
    assert all(torch.equal(step(model, optimizer, n), loss) for n, loss in zip((1, 2), wanted, strict=True))


def test_checkpoints(pool, tmp_path):
    pool.run(resumes, str(tmp_path), world=2)


def attaches_by_itself() -> None:
    model = shardcore.shard(base(), tp=2)
    with pytest.raises(shardcore.WrapError, match=r"shardcore\.integrations\.peft\.get_peft_model"):
        peft.get_peft_model(model, lora())
    inputs = batch("llama", "causal_lm", base())(0, 0)
    with pytest.raises(shardcore.WrapError, match=r"shardcore\.integrations\.peft\.get_peft_model"):
        model(**inputs)
    data = shardcore.shard(base(), tp=1, dp=2)
    with pytest.raises(shardcore.WrapError, match=r"shardcore\.integrations\.peft\.get_peft_model"):
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
