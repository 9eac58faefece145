"""Models of transformers and PEFT that hold a sharded one are saved whole by their own `save_pretrained`."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import sys
from collections.abc import Callable
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
import transformers

from adapters import base, lora, shaken  # from support/

TP2 = {"tp": 2}


def with_images() -> Any:
    text = base(num_hidden_layers=1).config
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    return transformers.LlavaForConditionalGeneration(config)


def body(model: Any, options: dict[str, Any]) -> None:
    model.model = shardcore.shard(model.model, **options)


def language_model(model: Any, options: dict[str, Any]) -> None:
    model.model.language_model = shardcore.shard(model.model.language_model, **options)


def base_model(model: Any, options: dict[str, Any]) -> None:
    shardcore.shard(model.get_base_model(), **options)


def inside_of_adapters(model: Any, options: dict[str, Any]) -> None:
    language_model(model.get_base_model(), options)


#: (the model, what shards a part of it)
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, dict[str, Any]], None]]] = {
    "a head": (lambda: base(tie_word_embeddings=False), body),
    "a model with images": (with_images, language_model),
    "adapters": (lambda: shaken(peft.get_peft_model(base(), lora())), base_model),
    "adapters of a model with images": (
        lambda: shaken(peft.get_peft_model(with_images(), lora(target_modules="all-linear"))),
        inside_of_adapters,
    ),
}


def saves_as_unsharded(folder: str, options: dict[str, Any], names: list[str]) -> None:
    for number, name in enumerate(names):
        build, shard_part = HOLDERS[name]
        model, place = build(), Path(folder) / str(number)
        reference = copy.deepcopy(model)
        shard_part(model, options)
        model.save_pretrained(place / "ours")
        if dist.get_rank() == 0:
            reference.save_pretrained(place / "theirs")
        dist.barrier()
        ours, theirs = ({path.name: path for path in (place / at).iterdir()} for at in ("ours", "theirs"))
        assert ours.keys() == theirs.keys(), name
        for file in [file for file in theirs if file.endswith(".safetensors")]:
            got, wanted = (importlib.import_module("safetensors.torch").load_file(at[file]) for at in (ours, theirs))
            assert got.keys() == wanted.keys(), name
            assert all(torch.equal(got[key], wanted[key]) for key in wanted), name
        for file in [file for file in theirs if file.endswith("config.json")]:
            got, wanted = (json.loads(at[file].read_text()) for at in (ours, theirs))
            for settings in (got, wanted):
                settings.get("target_modules", []).sort()
            assert got == wanted, name


@pytest.mark.parametrize("options", [TP2, pytest.param({"tp": 1, "dp": 2}, marks=pytest.mark.nightly)], ids=str)
def test_saves_as_unsharded(pool, tmp_path, options):
    pool.run(saves_as_unsharded, str(tmp_path), options, list(HOLDERS), world=2)


def is_told_before_anything_is_written(folder: str) -> list[str]:
    place, said = Path(folder), []
    model = base(tie_word_embeddings=False)
    body(model, TP2)
    if dist.get_rank() == 1:
        model.model.embed_tokens.to_empty(device="meta")
    with pytest.raises(shardcore.ShardcoreError) as caught:
        model.save_pretrained(place / "ours")
    said.append(str(caught.value))
    assert not (place / "ours").exists()
    return said


def test_all_ranks_are_told_before_anything_is_written(pool, tmp_path):
    first, second = pool.run(is_told_before_anything_is_written, str(tmp_path), world=2)
    assert "rank 1 cannot save, so nothing was written" in first[0]
    assert "is on the meta device" in second[0]


def leaves_the_classes_alone() -> None:
    gc.unfreeze()  # what the pool keeps out of collections may have become garbage
    gc.collect()  # models of other tests
    saved = [transformers.PreTrainedModel, peft.PeftModel]
    native = [cls.save_pretrained for cls in saved]
    model = base(tie_word_embeddings=False)
    body(model, TP2)
    assert all(cls.save_pretrained is not own for cls, own in zip(saved, native, strict=True))
    del model
    gc.collect()
    assert [cls.save_pretrained for cls in saved] == native


def test_classes_are_as_before_when_no_sharded_model_is_left(pool):
    pool.run(leaves_the_classes_alone, world=2)
