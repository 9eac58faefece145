"""What PEFT has beside LoRA, on sharded models: the gradients and steps of the unsharded model."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore_loop import WholeTensors
from shardcore_testing.parity import whole

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import peft

from adapters import (  # from support/
    SP,
    UNEVEN,
    adapted,
    base,
    batch,
    broadcast,
    close,
    equal_training,
    lora,
    named,
    outputs,
    peft_room,
    trains,
    trains_after,
)
from stacks import ADAPTERS

pytestmark = pytest.mark.usefixtures("float64_throughout")


def dora(**more: Any) -> Any:
    return lora(use_dora=True, **more)


#: (settings, options of shard, family, case, options of the model)
MAGNITUDES: dict[str, tuple[Any, ...]] = {
    "every linear": (dora(lora_dropout=0.5), {"tp": 2}),
    "sequence": (dora(), {"tp": 2, **SP}),
    "data": (dora(), {"tp": 2, "dp": 2, **SP}),
    "shared KV heads": (dora(lora_dropout=0.5), {"tp": 4}, "llama", "tied_shared_kv"),
    "uneven parts": (dora(lora_dropout=0.5), {"tp": 3, **SP}, "llama", "causal_lm", UNEVEN),
    "tables": (
        dora(target_modules=["embed_tokens", "q_proj", "lm_head"]),
        {"tp": 2, "parallel_output": True, **SP},
    ),
    "bert": (dora(target_modules="all-linear", lora_dropout=0.5), {"tp": 2, **SP}, "bert", "masked_lm"),
    "biases": (dora(bias="lora_only", target_modules=["query", "dense"]), {"tp": 2}, "bert", "masked_lm"),
    "vit, a convolution": (
        dora(target_modules=["query", "output.dense", "projection"]),
        {"tp": 2},
        "vit",
        "image_classification",
    ),
    "neox, fused": (
        dora(target_modules="all-linear", lora_dropout=0.5),
        {"tp": 2},
        "gpt_neo",
        "GPTNeoXForCausalLM",
    ),
    "gpt2, transposed": (dora(target_modules="all-linear", fan_in_fan_out=True), {"tp": 2}, "gpt2", "causal_lm"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gpt2, transposed" else pytest.mark.nightly)  # fused: rows of each rank
        for name in MAGNITUDES
    ],
)
def test_dora(pool, name):
    config, options, *rest = MAGNITUDES[name]
    more = rest.pop() if len(rest) > 2 else {}
    pool.run(trains, config, options, *rest, **more, world=options["tp"] * options.get("dp", 1))


def begins_with_norms(config: Any, options: dict[str, Any], family: str, case: str) -> None:
    """Attached after `shard`, magnitudes begin as PEFT's do: with the norms of whole rows."""
    reference = peft.get_peft_model(base(family, case), copy.deepcopy(config))
    model = peft_room().get_peft_model(shardcore.shard(base(family, case), **options), config)
    magnitudes = [name for name in named(reference) if "magnitude" in name]
    assert magnitudes
    for name in magnitudes:
        close(whole(named(model)[name].detach()), named(reference)[name].detach(), name)
    trains_after(config, options, "get_peft_model", family, case)
    trains_after(config, options, "add_adapter", family, case)


@pytest.mark.nightly
@ADAPTERS
@pytest.mark.parametrize("name", ["every linear", "shared KV heads", "tables", "vit, a convolution", "neox, fused"])
def test_dora_after(pool, name):
    config, options, *model = MAGNITUDES[name]
    pool.run(begins_with_norms, config, options, *(model or ("llama", "causal_lm")), world=options["tp"])


def trains_prompts(config: Any, when: str, options: dict[str, Any], *model: str) -> None:
    reference = adapted(base(*model), config).double()  # PEFT makes prompts in float32
    if when == "before":
        sharded = shardcore.shard(copy.deepcopy(reference), **options)
    else:
        torch.manual_seed(dist.get_rank())
        sharded = peft_room().get_peft_model(shardcore.shard(base(*model), **options), config)
        sharded.prompt_encoder.double()
        weight = sharded.prompt_encoder.default.embedding.weight
        assert torch.equal(weight, broadcast(weight.detach()))
        sharded.prompt_encoder.load_state_dict(reference.prompt_encoder.state_dict())
    place = {"replica": dist.get_rank() // options.get("tp", 1), "replicas": options.get("dp", 1)}
    equal_training(sharded, reference, batch(*(model or ("llama", "causal_lm")), base(*model)), **place)
    if "dp" in options:
        return
    ids = batch(*(model or ("llama", "causal_lm")), base(*model))(0, 0)["input_ids"]
    settings = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Position ids are not supported")
        assert torch.equal(sharded.eval().generate(**settings), reference.eval().generate(**settings))


PROMPTS = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=8),
    "prefixes": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "projected prefixes": peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=8
    ),
}
ON = {"tp": {"tp": 2}, "sequence": {"tp": 2, **SP}, "data": {"tp": 2, "dp": 2}, "data alone": {"tp": 1, "dp": 2}}


@pytest.mark.nightly
@ADAPTERS
@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(pool, name, when, on):
    pool.run(trains_prompts, PROMPTS[name], when, ON[on], world=ON[on]["tp"] * ON[on].get("dp", 1))


@pytest.mark.nightly
@pytest.mark.parametrize("on", ["tp", "sequence"])
def test_prefixes_of_shared_heads(pool, on):
    options = {**ON[on], "tp": 4}
    pool.run(trains_prompts, PROMPTS["prefixes"], "before", options, "llama", "tied_shared_kv", world=4)


def classifies(kind: str, **more: Any) -> Any:
    return getattr(peft, kind)(task_type="SEQ_CLS", num_virtual_tokens=3, **more)


BERT = ("bert", "sequence_classification")
LLAMA = ("llama", "sequence_classification")


def prompts_of_peft_itself():
    ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
    for config in PROMPTS.values():
        model = peft.get_peft_model(shardcore.shard(base(), tp=2), config)
        with pytest.raises(shardcore.NotSupportedError, match=r"PEFT itself has put prompts .*shardcore_peft.get_peft"):
            model(input_ids=ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers: PEFT calls by an older name
            peft.get_peft_model(base(), config)(input_ids=ids)  # another model is as ever


def test_prompts_that_peft_itself_puts_around_a_sharded_model_are_refused(pool):
    pool.run(prompts_of_peft_itself, world=2)


#: Prompts beside a head that is trained: (settings, options of shard, family, case)
BESIDE = {
    "prompts": (classifies("PromptTuningConfig"), {"tp": 2}, *BERT),
    "prompts, sequence": (classifies("PromptTuningConfig"), {"tp": 2, **SP}, *BERT),
    "prompts, data": (classifies("PromptTuningConfig"), {"tp": 2, "dp": 2}, *BERT),
    "prompts, data alone": (classifies("PromptTuningConfig"), {"tp": 1, "dp": 2}, *BERT),
    "prompts, score": (classifies("PromptTuningConfig"), {"tp": 2}, *LLAMA),
    "p-tuning": (classifies("PromptEncoderConfig", encoder_hidden_size=8), {"tp": 2}, *BERT),
    "prefixes": (classifies("PrefixTuningConfig"), {"tp": 2}, *LLAMA),
    "the head of a language model": (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, modules_to_save=["lm_head"]),
        {"tp": 2, **SP},
        "llama",
        "causal_lm",
    ),
}


def trains_beside_a_head(folder: str, config: Any, options: dict[str, Any], *of: str) -> None:
    """Prompts and a head are clipped and stepped together, and saved for one process."""
    reference = adapted(base(*of), config).double()  # PEFT makes prompts in float32
    model = shardcore.shard(copy.deepcopy(reference), **options)
    inputs = batch(*of, base(*of))
    place = {"replica": dist.get_rank() // options["tp"], "replicas": options.get("dp", 1)}
    equal_training(model, reference, inputs, **place)
    model.save_pretrained(folder)
    dist.barrier()
    alone = peft.PeftModel.from_pretrained(base(*of), folder).double()
    close(outputs(alone, inputs), outputs(reference, inputs), "saved", 1e-6)
    names = "lm_head" if of[1] == "causal_lm" else "classifier, score"  # once, though PEFT saves them with its own
    with pytest.raises(shardcore.NotSupportedError, match=rf"a part of the model \({names}\): attach it before"):
        peft_room().from_pretrained(shardcore.shard(base(*of), **options), folder)
    again = shardcore.shard(peft.PeftModel.from_pretrained(base(*of), folder).double(), **options)
    close(outputs(again, inputs), outputs(alone, inputs), "loaded, and sharded")


@pytest.mark.nightly
@ADAPTERS
@pytest.mark.parametrize("name", BESIDE)
def test_prompts_beside_a_head(pool, tmp_path, name):
    config, options, *of = BESIDE[name]
    world = options["tp"] * options.get("dp", 1)
    pool.run(trains_beside_a_head, str(tmp_path), config, options, *of, world=world)


def lora_fa(model: Any) -> Any:
    return importlib.import_module("peft.optimizers").create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2)


def steps_pairs_of_matrices() -> None:
    """LoRA-FA is refused in words before its first step, and steps whole tensors as it does unsharded."""
    reference = adapted(base(), lora())
    model = shardcore.shard(copy.deepcopy(reference), tp=2)
    inputs = batch("llama", "causal_lm", base())(0, 0)
    theirs, ours = lora_fa(reference), lora_fa(model)
    for one in (reference, model):
        one(**inputs).loss.backward()
    with pytest.raises(shardcore.NotSupportedError, match=r"LoraFAOptimizer uses.*shardcore_loop\.WholeTensors"):
        ours.step()
    ours = WholeTensors(type(ours), ours.param_groups)
    for optimizer in (theirs, ours):
        optimizer.step()
    for name, parameter in named(reference).items():
        close(whole(named(model)[name].detach()), parameter.detach(), name, 1e-9)


def test_lora_fa(pool):
    pool.run(steps_pairs_of_matrices, world=2)
