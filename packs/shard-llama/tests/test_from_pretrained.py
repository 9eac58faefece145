"""`shardcore.from_pretrained`: checkpoints as they are on the hub become sharded models."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

import shardcore
from shardcore.errors import AgreementError, ConfigError
from shardcore_testing.parity import whole

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def saved(folder, cls=LlamaForCausalLM, tied=False, **options):
    torch.manual_seed(0)
    model = cls(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(folder, **options)
    return model


def assert_equal(native, model):
    for kind in ("named_parameters", "named_buffers"):
        wanted, got = dict(getattr(native, kind)()), dict(getattr(model, kind)())
        assert wanted.keys() == got.keys()
        for name, tensor in wanted.items():
            mine = whole(got[name].detach())
            assert mine.dtype == tensor.dtype, name
            assert torch.equal(mine, tensor.detach()), name
    assert native.training == model.training
    assert native.config.to_diff_dict() == model.config.to_diff_dict()
    if native.can_generate():
        assert native.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()


def as_native(folder, cls, fields, options):
    named = getattr(transformers, cls)
    native = named.from_pretrained(folder, **options)
    model = shardcore.from_pretrained(cls if len(cls) % 2 else named, folder, **fields, **options)
    assert_equal(native, model)
    assert isinstance(model, type(native))
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        wanted, got = native(input_ids=ids)[0].double(), model(input_ids=ids)[0].double()
    torch.testing.assert_close(got, wanted, atol=2e-2 if native.dtype != torch.float32 else 1e-5, rtol=1e-2)


CHECKPOINTS = {
    "one file": ({}, {}),
    "many files": ({"max_shard_size": "10KB"}, {}),
    "tied": ({"tied": True}, {}),
    "bfloat16": ({}, {"dtype": torch.bfloat16}),
    "auto": ({}, {"dtype": "auto"}),
    "eager": ({}, {"attn_implementation": "eager"}),
    "a variant": ({"variant": "half"}, {"variant": "half"}),
    "a mapping": ({}, {"key_mapping": {"^model.layers.1.": "model.layers.1."}}),
    "an attribute": ({}, {"rms_norm_eps": 1e-3, "use_cache": False}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(pool, tmp_path, name):
    saving, options = CHECKPOINTS[name]
    saved(tmp_path, **saving)
    pool.run(as_native, str(tmp_path), "LlamaForCausalLM", {"tp": 2}, options)


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        (1, {}),
        (3, {"tp": 1, "dp_shard_size": 3}),
        (4, {"tp": 2, "dp_shard_size": 2}),
        (4, {"tp": 4, "enable_sequence_parallelism": True}),
    ],
)
def test_meshes(pool, tmp_path, world, fields):
    saved(tmp_path, max_shard_size="20KB")
    pool.run(as_native, str(tmp_path), "AutoModelForCausalLM", fields, {}, world=world)


def test_prefixes(pool, tmp_path):
    saved(tmp_path / "head")
    saved(tmp_path / "base", cls=LlamaModel, tied=True)
    pool.run(as_native, str(tmp_path / "head"), "LlamaModel", {"tp": 2}, {})
    pool.run(as_native, str(tmp_path / "base"), "LlamaForCausalLM", {"tp": 2}, {})


def test_subfolder(pool, tmp_path):
    saved(tmp_path / "inner")
    pool.run(as_native, str(tmp_path), "LlamaForCausalLM", {"tp": 2}, {"subfolder": "inner"})


@contextmanager
def heard():
    """Collect what transformers says."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    library = logging.getLogger("transformers")
    library.addHandler(handler)
    level = library.level
    library.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        library.removeHandler(handler)
        library.setLevel(level)


def missing_head(folder, fields):
    torch.manual_seed(dist.get_rank())
    with heard() as said:
        model, info = shardcore.from_pretrained(
            "LlamaForSequenceClassification", folder, num_labels=3, output_loading_info=True, **fields
        )
    assert set(info["missing_keys"]) == {"score.weight"}
    about = [text for text in said if "score.weight" in text]
    assert len(about) == (dist.get_rank() == 0), said
    assert not about or folder in about[0]
    native = LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)
    for name, parameter in native.named_parameters():
        if name != "score.weight":
            assert torch.equal(whole(dict(model.named_parameters())[name].detach()), parameter.detach()), name
    head = whole(model.score.weight.detach()).clone()
    assert 0.01 < head.std() < 0.03
    return head


def test_missing_heads_are_the_same_on_every_mesh(pool, tmp_path):
    saved(tmp_path)
    heads = [
        head
        for world, fields in ((1, {}), (2, {"tp": 2}), (4, {"tp": 2, "dp_shard_size": 2}))
        for head in pool.run(missing_head, str(tmp_path), fields, world=world)
    ]
    assert all(torch.equal(head, heads[0]) for head in heads)
    (other,) = pool.run(missing_head, str(tmp_path), {"seed": 1}, world=1)
    assert not torch.equal(other, heads[0])


def mismatched(folder):
    native = {"num_labels": 5, "ignore_mismatched_sizes": True}
    model, info = shardcore.from_pretrained(
        LlamaForSequenceClassification, folder, tp=2, output_loading_info=True, **native
    )
    assert [key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]] == ["score.weight"]
    assert whole(model.score.weight).shape == (5, 32)
    with pytest.raises(ConfigError, match=r"could not load .* into a LlamaForSequenceClassification"):
        shardcore.from_pretrained(LlamaForSequenceClassification, folder, tp=2, num_labels=5)


def test_mismatched_sizes(pool, tmp_path):
    saved(tmp_path, cls=LlamaForSequenceClassification)  # two labels
    pool.run(mismatched, str(tmp_path))


def test_pickled_files_only_when_asked_for(pool, tmp_path):
    model = saved(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    pool.run(refused, str(tmp_path), {}, "pytorch_model.bin, which is pickled")
    pool.run(from_pickle, str(tmp_path), load_file_of(model))
    torch.save({"weight": Evil()}, tmp_path / "pytorch_model.bin")
    pool.run(refused, str(tmp_path), {"use_safetensors": False}, "cannot be read with weights_only")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("several", [False, True])
def test_pickled_files_are_those_that_transformers_reads(pool, tmp_path, several):
    """A variant, and a shard that the index does not name any more, lie beside them."""
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = model.state_dict()
    wrong = {name: tensor * 2 for name, tensor in state.items()}
    torch.save(wrong, tmp_path / "pytorch_model.fp16.bin")
    if several:
        torch.save(state, tmp_path / "pytorch_model-00001-of-00001.bin")
        torch.save(wrong, tmp_path / "pytorch_model-00002-of-00002.bin")
        index = {"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    pool.run(from_pickle, str(tmp_path), load_file_of(model))
    pool.run(refused, str(tmp_path), {"use_safetensors": False, "variant": "other"}, "of the variant other")


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code ran')",))


def load_file_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def from_pickle(folder, wanted):
    model = shardcore.from_pretrained(LlamaForCausalLM, folder, tp=2, use_safetensors=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), wanted[name]), name


def refused(folder, options, message, cls=LlamaForCausalLM):
    with pytest.raises(ConfigError, match=message):
        shardcore.from_pretrained(cls, folder, tp=2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, "device_map='auto' makes no sense here: the mesh"),
        ({"tp_plan": "auto"}, "the policy of the model's pack"),
        ({"quantization_config": {"load_in_8bit": True}}, "load_in_4bit=True"),
        ({"state_dict": {"a": 1}}, "weights are read from files"),
        ({"weights_only": False}, "would run code"),
    ],
)
def test_options_that_make_no_sense(pool, tmp_path, options, message):
    saved(tmp_path)
    pool.run(refused, str(tmp_path), options, message)


def test_what_is_no_checkpoint(pool, tmp_path):
    saved(tmp_path)
    pool.run(refused, str(tmp_path / "x"), {}, "is no folder")
    pool.run(refused, str(tmp_path), {}, "no class 'LlamaForNothing' in transformers", "LlamaForNothing")
    pool.run(refused, str(tmp_path), {}, "AutoModelForImageClassification has no", "AutoModelForImageClassification")
    pool.run(refused, str(tmp_path), {}, "got <class 'torch.nn", torch.nn.Linear)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    pool.run(refused, str(tmp_path), {}, r"model.safetensors \(\d+ bytes\) cannot be read")
    (tmp_path / "config.json").write_text("{")
    pool.run(refused, str(tmp_path), {}, "cannot read the configuration")


def one_rank(folder, other):
    path = other if dist.get_rank() else folder
    with pytest.raises((AgreementError, ConfigError)) as caught:
        shardcore.from_pretrained(LlamaForCausalLM, path, tp=2)
    return str(caught.value)


def test_ranks_that_see_other_files(pool, tmp_path):
    saved(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    state = load_file(tmp_path / "b" / "model.safetensors")
    save_file({k: v.half() for k, v in state.items()}, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    assert all("weights" in said for said in pool.run(one_rank, str(tmp_path / "a"), str(tmp_path / "b")))
    # Of another revision: the same sizes, and one other value of what every rank holds.
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], 3.0)
    save_file(state, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    assert all("weights" in said for said in pool.run(one_rank, str(tmp_path / "a"), str(tmp_path / "b")))
    assert all("is no folder" in said for said in pool.run(one_rank, str(tmp_path / "a"), str(tmp_path / "none")))


def test_experts_are_merged(pool, tmp_path):
    """Where the release merges experts, a tensor of the model is made of many of the file, and only parts are read."""
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, **SIZES}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**config)).save_pretrained(tmp_path)
    written = json.dumps(sorted(load_file(tmp_path / "model.safetensors")))
    assert "experts.3.w1.weight" in written
    pool.run(merged, str(tmp_path), world=1)


def merged(folder):
    from shardcore.weights.boxes import Reader
    from shardcore.weights.recipes import slices
    from shardcore_transformers.loading import load_empty

    native = transformers.MixtralForCausalLM.from_pretrained(folder)
    _, weights, _ = load_empty(AutoModelForCausalLM, folder)
    wanted = dict(native.named_parameters())
    assert wanted.keys() == weights.recipes.keys()
    for name, recipe in weights.recipes.items():
        box = tuple((size // 3, size) for size in recipe.shape)
        reader = Reader()
        assert torch.equal(reader.read(recipe, box), wanted[name].detach()[slices(box)]), name
        assert not reader._full, name
