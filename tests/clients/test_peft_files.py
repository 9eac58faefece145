"""Adapters of sharded models are saved, loaded, switched, merged and taken off as those of unsharded ones."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore_testing.parity import whole

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import peft

from adapters import (  # from support/
    EVERY,
    SP,
    adapted,
    base,
    batch,
    close,
    ia3,
    lora,
    named,
    outputs,
    peft_room,
    shaken,
)
from stacks import ADAPTERS

pytestmark = pytest.mark.usefixtures("float64_throughout")


def files(folder: Path) -> dict[str, Any]:
    return read_file(folder / "adapter_model.safetensors")


def read_tensors(folder: Path) -> dict[str, Any]:
    return read_file(folder / "model.safetensors")


def read_file(path: Path) -> dict[str, Any]:
    return importlib.import_module("safetensors.torch").load_file(path)


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
    again = peft_room().from_pretrained(shardcore.shard(base(), **options), place / "theirs")
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
    close(outputs(again.unload(), inputs), outputs(base(), inputs), "unloaded")


@pytest.mark.parametrize("how", ["before", pytest.param("after", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "dp": 2}], ids=["tp", "tp and dp"])
def test_saving(pool, tmp_path, options, how):
    pool.run(saves_and_loads, str(tmp_path), options, how, world=2 * options.get("dp", 1))


def saves_by_the_model(folder: str, options: dict[str, Any], when: str, saved: list[str] | None) -> None:
    """Adapters of transformers' own `add_adapter` are written as one process writes them, and load in one."""
    place = Path(folder)
    config = lora(target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    reference = base()
    reference.add_adapter(copy.deepcopy(config))
    shaken(reference)
    if when == "before":
        model = shardcore.shard(copy.deepcopy(reference), **options)
    else:
        model = shardcore.shard(base(), **options)
        model.add_adapter(config)
        state = {name: p.detach() for name, p in named(reference).items() if p.requires_grad}
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    model.save_pretrained(place / "ours")
    if dist.get_rank() == 0:
        reference.save_pretrained(place / "theirs")
    dist.barrier()
    assert {p.name for p in (place / "ours").iterdir()} == {p.name for p in (place / "theirs").iterdir()}
    ours, theirs = files(place / "ours"), files(place / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    configs = [json.loads((place / at / "adapter_config.json").read_text()) for at in ("ours", "theirs")]
    for found in configs:
        found["target_modules"].sort()
    assert configs[0] == configs[1], configs
    inputs = batch("llama", "causal_lm", base())
    wanted = outputs(reference, inputs)
    close(outputs(model, inputs), wanted, "sharded")
    alone = base()
    alone.load_adapter(str(place / "ours"))
    close(outputs(alone, inputs), wanted, "in one process")
    if saved and "dp" in options:
        return  # a copy of what FSDP2 has divided already is refused
    again = shardcore.shard(base(), **options)
    again.load_adapter(str(place / "theirs"))
    close(outputs(again, inputs), wanted, "in a sharded model")


#: (options of shard, when adapters are attached, what is saved beside them)
BY_THE_MODEL = {
    "before": ({"tp": 2}, "before", None),
    "after": ({"tp": 2}, "after", None),
    "before, a head": ({"tp": 2}, "before", ["lm_head"]),
    "after, a head": ({"tp": 2}, "after", ["lm_head"]),
    "before, data": ({"tp": 2, "dp": 2}, "before", ["lm_head"]),
    "after, data": ({"tp": 2, "dp": 2}, "after", None),
}


@ADAPTERS
@pytest.mark.parametrize("name", BY_THE_MODEL)
def test_adapters_of_the_model_itself(pool, tmp_path, name):
    options, *rest = BY_THE_MODEL[name]
    pool.run(saves_by_the_model, str(tmp_path), options, *rest, world=2 * options.get("dp", 1))


def swaps_and_refuses(folder: str, options: dict[str, Any]) -> None:
    """The values of another adapter, with another scaling, take the place of the first one's; other ranks do not."""
    place, inputs = Path(folder), batch("llama", "causal_lm", base())
    if dist.get_rank() == 0:
        adapted(base(), lora(lora_alpha=5), seed=1).save_pretrained(place / "other")
        adapted(base(), lora(r=6), seed=2).save_pretrained(place / "larger")
    dist.barrier()
    reference = adapted(base(), lora())
    model = shardcore.shard(copy.deepcopy(reference), **options)
    before, trains = outputs(reference, inputs), {n for n, p in named(model).items() if p.requires_grad}
    with pytest.raises(shardcore.ConfigError, match=r"has r=4,.* r=6,.*Load it beside"):
        peft_room().hotswap_adapter(model, place / "larger", "default")
    close(outputs(model, inputs), before, "refused")
    model(**inputs(0, 0))  # what FSDP2 gathers here, it keeps gathered
    importlib.import_module("peft.utils.hotswap").hotswap_adapter(reference, place / "other", "default", "cpu")
    peft_room().hotswap_adapter(model, place / "other", "default", "cpu")
    close(outputs(model, inputs), outputs(reference, inputs), "swapped")
    assert not torch.equal(before, outputs(reference, inputs))
    for name, parameter in named(reference).items():
        close(whole(named(model)[name].detach()), parameter.detach(), name)
    # What trains goes on to; PEFT 0.18 leaves it frozen.
    assert {n for n, p in named(model).items() if p.requires_grad} == trains


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 1, "dp": 2}], ids=["tp", "data alone"])
def test_swapping(pool, tmp_path, options):
    pool.run(swaps_and_refuses, str(tmp_path), options, world=2)


def reads_what_was_computed(folder: str) -> None:
    """Adapters that began with what another run has computed are read after `shard`, and as such refused."""
    place, inputs = Path(folder), batch("llama", "causal_lm", base())
    warnings.filterwarnings("ignore", "lora with eva initialization")  # which takes less memory in another way
    began = {"orthogonal": {}, "eva": {"eva_config": peft.EvaConfig()}}
    for way, more in began.items():
        reference = adapted(base(), lora(init_lora_weights=way, **more))
        if dist.get_rank() == 0:
            reference.save_pretrained(place / way)
        dist.barrier()
        model = peft_room().from_pretrained(shardcore.shard(base(), tp=2), place / way)
        close(outputs(model, inputs), outputs(reference, inputs), way)
        model.load_adapter(place / way, "second")
        model.set_adapter("second")
        close(outputs(model, inputs), outputs(reference, inputs), (way, "second"))
        alone = shardcore.shard(base(), tp=2)
        alone.load_adapter(str(place / way))
        close(outputs(alone, inputs), outputs(reference, inputs), (way, "of the model itself"))
    with pytest.raises(shardcore.NotSupportedError, match="init_lora_weights='eva' computes"):
        model.add_adapter("third", lora(init_lora_weights="eva", eva_config=peft.EvaConfig()))


@ADAPTERS
def test_what_began_with_values_is_read(pool, tmp_path):
    pool.run(reads_what_was_computed, str(tmp_path), world=2)


def converts(folder: str) -> None:
    """A save that PEFT would convert, for which it loads an adapter on the rank that writes, is refused on all."""
    model = shardcore.shard(adapted(base(), lora()), tp=2)
    model.save_pretrained(folder)
    more = {"path_initial_model_for_weight_conversion": folder} if dist.get_rank() == 0 else {}
    kind = shardcore.NotSupportedError if more else shardcore.AgreementError
    with pytest.raises(kind, match="convert in one process"):
        model.save_pretrained(f"{folder}/other", **more)
    assert not Path(folder, "other").exists()


def test_conversion_is_refused_on_all_ranks(pool, tmp_path):
    pool.run(converts, str(tmp_path), world=2)


def merges(config: Any, options: dict[str, Any], safely: bool, when: str, family: str, case: str) -> None:
    """Merged weights are those of the unsharded model, and what is trained beside the adapters is saved and loaded."""
    reference = adapted(base(family, case), config)
    if when == "before":
        model = shardcore.shard(copy.deepcopy(reference), **options)
    else:
        model = peft_room().get_peft_model(shardcore.shard(base(family, case), **options), config)
        state = {name: p.detach() for name, p in named(reference).items() if p.requires_grad}
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    model(**batch(family, case, reference.get_base_model())(0, 0))  # what FSDP2 gathers here, it keeps gathered
    for one in (reference, model):
        one.merge_adapter(safe_merge=safely)
    for name, parameter in named(reference).items():
        close(whole(named(model)[name].detach()), parameter.detach(), ("merged", name))
    if safely:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unmerge result can be inaccurate")  # of scales, which it divides by
            for one in (reference, model):
                one.unmerge_adapter()
        for name, parameter in named(reference).items():
            close(whole(named(model)[name].detach()), parameter.detach(), ("unmerged", name))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        merged, wanted = model.merge_and_unload(), reference.merge_and_unload()
    inputs = batch(family, case, wanted)
    close(outputs(merged, inputs), outputs(wanted, inputs), "merged and unloaded")
    for name, parameter in named(wanted).items():
        close(whole(named(merged)[name].detach()), parameter.detach(), ("unloaded", name))
    loss = merged.requires_grad_(True)(**inputs(0, 0)).loss
    loss.backward()  # the replicas have the same batch
    wanted.requires_grad_(True)(**inputs(0, 0)).loss.backward()
    for name, parameter in named(wanted).items():
        if parameter.grad is not None:
            close(whole(named(merged)[name].grad), parameter.grad, ("trained on", name), 1e-9)


MERGED = {
    "LoRA": (lora(), {"tp": 2}, "llama", "tied_shared_kv"),
    "magnitudes": (lora(use_dora=True), {"tp": 2}, "llama", "tied_shared_kv"),
    "magnitudes of a table": (
        lora(use_dora=True, target_modules=["embed_tokens", "q_proj", "lm_head"]),
        {"tp": 2},
        "llama",
        "causal_lm",
    ),
    "magnitudes, data alone": (
        lora(use_dora=True, target_modules=["embed_tokens", "q_proj", "down_proj", "lm_head"]),
        {"tp": 1, "dp": 2},
        "llama",
        "causal_lm",
    ),
    "magnitudes, data": (lora(use_dora=True), {"tp": 2, "dp": 2}, "llama", "causal_lm"),
    "scales": (ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]), {"tp": 2}, "llama", "causal_lm"),
    "scales, data alone": (
        ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]),
        {"tp": 1, "dp": 2},
        "llama",
        "causal_lm",
    ),
    "a head": (lora(modules_to_save=["lm_head"]), {"tp": 2, **SP}, "llama", "causal_lm"),
    "fused": (EVERY, {"tp": 2}, "gpt_neo", "GPTNeoXForCausalLM"),
    "transposed": (lora(target_modules="all-linear", fan_in_fan_out=True), {"tp": 2}, "gpt2", "causal_lm"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("safely", [False, True])
@pytest.mark.parametrize("name", MERGED)
def test_merging(pool, name, safely):
    config, options, *model = MERGED[name]
    pool.run(merges, config, options, safely, "before", *model, world=options["tp"] * options.get("dp", 1))


LATER = ["LoRA", "magnitudes", "magnitudes of a table", "magnitudes, data alone", "a head", "fused"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", LATER)
def test_merging_what_came_after(pool, name):
    config, options, *model = MERGED[name]
    pool.run(merges, config, options, True, "after", *model, world=2)


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


def loads_the_folder_of_an_adapter(folder: str) -> None:
    place = Path(folder)
    for cls in ("LlamaForCausalLM", "AutoModelForCausalLM"):
        with pytest.raises(shardcore.ConfigError, match=rf"{cls}, 'the/base'.*peft\.from_pretrained\(model, '{folder}"):
            shardcore.from_pretrained(cls, place, tp=2)
    with pytest.warns(shardcore.ShardcoreWarning, match="beside the model, which was loaded without it") as caught:
        shardcore.from_pretrained("LlamaForCausalLM", place / "both", tp=2)
    assert caught[0].filename == __file__


def test_the_folder_of_an_adapter_is_no_model(pool, tmp_path):
    model = adapted(base(), lora())
    model.peft_config["default"].base_model_name_or_path = "the/base"
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "both")
    base().save_pretrained(tmp_path / "both")
    pool.run(loads_the_folder_of_an_adapter, str(tmp_path), world=2)
