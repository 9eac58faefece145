"""Training checkpoints become standard ones, the same files that the unsharded model would save."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import shardcore
from shardcore.checkpoint import Checkpoint
from shardcore_cli import main

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 128,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
MODELS = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, vocab_size=64)),
    # transformers 5 saves it under other names than the model has.
    "vit": lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=32, patch_size=16, num_labels=3)),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**WHISPER)),
}


def build(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def save(kind, folder, options):
    model = shardcore.shard(build(kind), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    shardcore.save_checkpoint(folder, model, optimizer, step=3, extra={"tokens": 7})
    dist.barrier()


def convert(*arguments):
    done = CliRunner().invoke(main, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout.split()


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("kind", list(MODELS))
def test_the_files_are_those_of_the_unsharded_model(pool, tmp_path, kind):
    pool.run(save, kind, str(tmp_path / "checkpoints"), {"tp": 2}, world=2)
    written = convert(tmp_path / "checkpoints", tmp_path / "converted", "--max-shard-size", "50KB")
    build(kind).save_pretrained(tmp_path / "wanted", max_shard_size="50KB")
    found, wanted = files_of(tmp_path / "converted"), files_of(tmp_path / "wanted")
    assert found.keys() == wanted.keys()
    assert len(found) > 3
    assert sorted(Path(name).name for name in written) == sorted(wanted)
    different = {name for name in wanted if found[name] != wanted[name]}
    # Tensors lie in the files in another order where transformers sorts them after renaming.
    for name in different:
        assert name.endswith(".safetensors")
        one, other = load_file(tmp_path / "converted" / name), load_file(tmp_path / "wanted" / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in other)


def modes(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in Path(folder).iterdir()}


def save_with_a_mask(folder, mask):
    old = os.umask(mask)
    try:
        model = shardcore.shard(build("untied"), tp=2)
        model.save_pretrained(f"{folder}/standard", max_shard_size="50KB")
        return Checkpoint(shardcore.save_checkpoint(f"{folder}/run", model)).index["about"]
    finally:
        os.umask(old)


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_files_may_be_read_as_the_umask_says(pool, tmp_path, mask):
    about, _ = pool.run(save_with_a_mask, str(tmp_path), mask, world=2)
    assert about["libraries"].keys() >= {
        "shardcore",
        "torch",
        "transformers",
        "shard-llama",
    }  # and the pack that served
    old = os.umask(mask)
    try:
        convert(tmp_path / "run", tmp_path / "converted", "--max-shard-size", "50KB")
    finally:
        os.umask(old)
    for folder in (tmp_path / "standard", tmp_path / "converted"):
        found = modes(folder)
        assert any(name.endswith(".safetensors") for name in found)
        assert set(found.values()) == {0o666 & ~mask}, found


def test_another_dtype_and_two_replicas(pool, tmp_path):
    pool.run(save, "tied", str(tmp_path / "checkpoints"), {"dp": 2}, world=2)
    convert(tmp_path / "checkpoints" / "step-3", tmp_path / "converted", "--dtype", "bfloat16")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "converted", dtype="auto")
    assert model.dtype == torch.bfloat16
    wanted = build("tied").to(torch.bfloat16).state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


class Net(nn.Module):
    """Tied, with a buffer; no library knows it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


@pytest.mark.parametrize("size", ["5GB", "1KB"])
def test_a_plain_module(tmp_path, size):
    model = Net()
    shardcore.save_checkpoint(tmp_path / "checkpoints", model)
    convert(tmp_path / "checkpoints", tmp_path / "out", "--max-shard-size", size, "--dtype", "float64")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    loaded = Net().double()
    if size == "5GB":
        assert names == {"model.safetensors"}
        file = tmp_path / "out" / "model.safetensors"
        assert load_model(loaded, file) == (set(), [])
        with safe_open(file, "pt") as written:
            assert written.metadata() == {"format": "pt", "head.weight": "embed.weight"}
            assert written.get_tensor("count").dtype == torch.int64
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        tensors = {
            key: value
            for name in set(index["weight_map"].values())
            for key, value in load_file(tmp_path / "out" / name).items()
        }
        loaded.load_state_dict({**tensors, "head.weight": tensors["embed.weight"]})
    assert torch.equal(loaded.embed.weight, model.embed.weight.double())
    assert int(loaded.count) == 3


def test_a_checkpoint_of_another_release(tmp_path):
    shardcore.save_checkpoint(tmp_path, build("tied"), step=1)
    index = tmp_path / "step-1" / "shardcore.json"
    text = json.loads(index.read_text())
    del text["checksums"]  # of one that is changed by hand
    text["about"]["config"]["num_hidden_layers"] = 3
    text["about"]["libraries"] = {"transformers": "9.9"}
    index.write_text(json.dumps(text))
    done = CliRunner().invoke(main, ["convert", str(tmp_path), str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "has other names or shapes than the checkpoint: model.layers.2." in done.output
    assert "Convert it with what it was saved with: transformers 9.9" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["5", "100B", "-1GB", "GB"])
def test_a_size_that_is_none(tmp_path, size):
    shardcore.save_checkpoint(tmp_path, Net())
    done = CliRunner().invoke(main, ["convert", str(tmp_path), str(tmp_path / "out"), f"--max-shard-size={size}"])
    assert done.exit_code == 1
    assert f"max_shard_size is '{size}'; wanted a number and KB, MB, GB or TB, such as 500MB" in done.output
    assert not (tmp_path / "out").exists()


PEAK = """
import re, sys
from shardcore_cli import main
main(["convert", *sys.argv[1:]], standalone_mode=False)
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def peak(*arguments: object) -> float:
    """Convert in a process of its own and return its largest resident memory, in MB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    match = re.search(r"peak (\d+)", done.stdout)
    assert match
    return int(match[1]) / 1024


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_no_more_than_one_file_is_in_memory(tmp_path):
    config = LlamaConfig(**{**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16})
    model = LlamaForCausalLM(config)
    megabytes = sum(p.nbytes for p in model.parameters()) / 2**20
    assert megabytes > 230
    shardcore.save_checkpoint(tmp_path / "large", model)
    shardcore.save_checkpoint(tmp_path / "small", build("tied"))
    idle = peak(tmp_path / "small", tmp_path / "out-small")
    used = peak(tmp_path / "large", tmp_path / "out", "--max-shard-size", "40MB") - idle
    print(f"{used:.0f} MB beyond idle for {megabytes:.0f} MB of weights")
    assert used < 40 + 3 * 4 + 25, used
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 6
