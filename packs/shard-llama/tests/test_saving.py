"""A sharded model is saved as the checkpoint that its unsharded twin would be, and as sparingly (H10, H15, H20)."""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llama_cases import adamw, batch, build, shard
from safetensors.torch import load_file
from saving_files import DP2, HYBRID, ODD, REPLICAS, SQUARE, TIED, TP2, TP4, assert_saved, names_in, weights
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardcore import AgreementError, ConfigError, MissingRanksError, NotSupportedError
from shardcore.agree import store_barrier
from shardcore.comm.parts import place_of
from shardcore_testing.parity import whole
from shardcore_transformers import _saving
from shardcore_transformers.writing import WriterBarrier

pytestmark = pytest.mark.newest

CASES = {
    "tp2": (TP2, ODD),
    "tp2-tied": (TP2, TIED),
    "tp2-bfloat16": (TP2, {**ODD, "dtype": torch.bfloat16}),
    "tp4": (TP4, ODD),
    "tp4-tied-biases": (TP4, {"tie_word_embeddings": True, "dtype": torch.float32}),
    "dp2-tied": (DP2, TIED),
    "tp2-dp2": (SQUARE, ODD),
    "tp2-dp2-tied": (SQUARE, TIED),
    "hybrid": (HYBRID, ODD),
    "replicas-tied": (REPLICAS, TIED),
}


# --- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_checkpoint_loads_without_shardcore(pool, tmp_path):
    for name, (axes, options) in CASES.items():
        world = 4 if axes in (TP4, SQUARE, HYBRID, REPLICAS) else 2
        pool.run(_save_case, str(tmp_path / name), axes, options, world=world)
    script = Path(tmp_path, "load.py")
    script.write_text(_LOAD)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-I", str(script), str(tmp_path), *CASES], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


_LOAD = """
import sys
sys.modules["shardcore"] = None  # importing it raises
import torch, transformers
for case in sys.argv[2:]:
    folder = sys.argv[1] + "/" + case
    wanted = torch.load(folder + ".pt")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert type(model).__name__ == "LlamaForCausalLM", case
    assert not any(info.values()), (case, info)
    assert model.config.architectures == ["LlamaForCausalLM"], (case, model.config.architectures)
    state = model.state_dict()
    assert state.keys() == wanted.keys(), case
    for name, tensor in wanted.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), (case, name)
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied, case
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False)
"""


def _save_case(folder: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    reference = build(**options)
    model = shard(copy.deepcopy(reference), **axes)
    model.save_pretrained(folder)
    assert_saved(folder, weights(reference))  # on every rank: it returns when all is written
    assert names_in(folder) == ["config.json", "generation_config.json", "model.safetensors"]
    if dist.get_rank() == 0:
        torch.save(reference.state_dict(), f"{folder}.pt")
    assert type(model).__name__.endswith("LlamaForCausalLM")


def test_same_files_as_the_unsharded_model(pool, tmp_path):
    pool.run(_same_files, str(tmp_path))


def _same_files(folder: str) -> None:
    reference = build(**TIED)
    for model in (reference, copy.deepcopy(reference)):
        model.register_buffer("table", torch.arange(5) + dist.get_rank())
    model = shard(model, sync_from=0, tp=2)
    ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
    model.save_pretrained(ours, max_shard_size=20_000, variant="half")
    if dist.get_rank() == 0:
        reference.save_pretrained(theirs, max_shard_size=20_000, variant="half")
        assert len(names_in(ours)) > 4
        assert names_in(ours) == names_in(theirs)
        for name in names_in(theirs):
            if name.endswith(".safetensors"):
                mine, wanted = load_file(ours / name), load_file(theirs / name)
                assert mine.keys() == wanted.keys()
                assert all(torch.equal(mine[key], wanted[key]) for key in wanted)
            else:
                assert (ours / name).read_text() == (theirs / name).read_text(), name


def test_ignored_and_renamed_entries(pool, tmp_path):
    pool.run(_ignored_and_renamed, str(tmp_path))


def _ignored_and_renamed(folder: str) -> None:
    reference = build(**TIED)
    model = shard(copy.deepcopy(reference))
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    model.save_pretrained(f"{folder}/ignored")
    wanted = weights(reference)
    wanted.pop("model.norm.weight")
    assert_saved(f"{folder}/ignored", wanted)
    try:
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # transformers 4, where Llama is not among the classes that heed it
        model._checkpoint_conversion_mapping = {"^decoder": "model"}
    else:
        model._weight_conversions = [WeightRenaming("^decoder", "model")]
        wanted = {name.replace("model.", "decoder."): tensor for name, tensor in wanted.items()}
    model.save_pretrained(f"{folder}/renamed", max_shard_size=20_000)
    assert_saved(f"{folder}/renamed", wanted)


@pytest.mark.parametrize("axes", [TP2, DP2, SQUARE], ids=["tp2", "dp2", "tp2-dp2"])
def test_after_training(pool, tmp_path, axes):
    pool.run(_after_training, str(tmp_path), axes, world=4 if axes is SQUARE else 2)


def _after_training(folder: str, axes: dict[str, int]) -> None:
    reference = build(**TIED)
    model = shard(copy.deepcopy(reference), **axes)
    optimizer = adamw(model)
    for step in range(2):
        model(**batch(reference, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(**batch(reference, step))  # FSDP2 leaves the root's parameters gathered
        model.save_pretrained(f"{folder}/{step}", max_shard_size=30_000)
    wanted = {name: whole(tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert_saved(f"{folder}/1", wanted)
    moved = [name for name, tensor in weights(reference).items() if not torch.equal(tensor, wanted[name])]
    assert moved == list(wanted)
    model(**batch(reference)).loss.backward()  # and it goes on training


def test_files_of_an_earlier_save(pool, tmp_path):
    pool.run(_earlier_save, str(tmp_path))


def _earlier_save(folder: str) -> None:
    rest = {"config.json", "generation_config.json"}
    for seed, limit in enumerate((20_000, 60_000, "1GB", 60_000)):
        reference = build(seed=seed, **ODD)
        shard(copy.deepcopy(reference)).save_pretrained(folder, max_shard_size=limit)
        assert_saved(folder, weights(reference))
        files = set(names_in(folder)) - rest
        if limit == "1GB":
            assert files == {"model.safetensors"}
        else:
            assert "model.safetensors" not in files
            assert f"model-00001-of-{len(files) - 1:05d}.safetensors" in files  # and no others beside the index
        dist.barrier()


def test_state_dict_of_the_user(pool, tmp_path):
    pool.run(_users_state_dict, str(tmp_path), DP2)


def _users_state_dict(folder: str, axes: dict[str, int]) -> None:
    reference = build(**ODD)
    model = shard(copy.deepcopy(reference), **axes)
    state = {name: tensor + 1 for name, tensor in reference.state_dict().items()}
    if dist.get_rank() == 0:  # alone, as the Trainer does
        model.save_pretrained(folder, state_dict=dict(state))
        assert_saved(folder, state)
        assert json.loads(Path(folder, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    else:
        model.save_pretrained(f"{folder}/other", state_dict={})
        assert not Path(folder, "other").exists()


def test_upload_comes_after_the_weights(pool, tmp_path):
    assert pool.run(_upload, str(tmp_path / "repository")) == [[True], []]


def _upload(folder: str) -> list[bool]:
    import transformers.modeling_utils as library

    class Anything:
        repo_id = "somebody/something"

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: self

    reference = build(**TIED)
    model = shard(copy.deepcopy(reference), **DP2)
    seen: list[bool] = []

    def upload(self: Any, working_dir: Any, *args: Any, **kwargs: Any) -> None:
        assert_saved(working_dir, weights(reference))
        seen.append(not [name for name in names_in(working_dir) if name.startswith(".")])

    native = type(reference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_create_repo", lambda self, *args, **kwargs: Anything.repo_id, raising=False)
        patch.setattr(native, "_upload_modified_files", upload)
        patch.setattr(library, "create_repo", lambda *args, **kwargs: Anything(), raising=False)
        patch.setattr(library, "hf_api", Anything, raising=False)
        patch.setattr(library, "create_and_tag_model_card", lambda *args, **kwargs: Anything())
        model.save_pretrained(folder, push_to_hub=True, max_shard_size=30_000, commit_message="weights")
    return seen


# --- who writes, who is there, what fails --------------------------------------------------------------------------


def test_writer(pool, tmp_path):
    pool.run(_writer, str(tmp_path), world=2)


def _writer(folder: str) -> None:
    reference, rank = build(**ODD), dist.get_rank()
    model = shard(copy.deepcopy(reference))
    place = f"{folder}/{rank}"
    model.save_pretrained(place)
    assert Path(place).exists() == (rank == 0)
    model.save_pretrained(place, is_main_process=rank == 1, max_shard_size=20_000)
    assert_saved(f"{folder}/1", weights(reference))
    assert "config.json" in names_in(f"{folder}/1")
    nowhere = f"{folder}/nowhere"
    with pytest.raises(ConfigError, match=r"all ranks \(0, 1\) passed is_main_process=False"):
        model.save_pretrained(nowhere, False)
    with pytest.raises(AgreementError, match="ranks 0 and 1 differ in max_shard_size: 1GB and 2GB"):
        model.save_pretrained(nowhere, max_shard_size="1GB" if rank == 0 else "2GB")
    with pytest.raises(NotSupportedError, match="safetensors"):
        model.save_pretrained(nowhere, safe_serialization=False)
    expected = NotSupportedError if rank == 1 else AgreementError
    with pytest.raises(expected, match="distributed_checkpoint=True"):
        model.save_pretrained(nowhere, distributed_checkpoint=rank == 1)
    # As transformers 5.23 leaves a model of a quantized checkpoint that it has dequantized.
    loading = types.SimpleNamespace(operations=[type("Fp8Dequantize", (), {})()])
    model._weight_conversions = [loading]
    with pytest.raises(
        NotSupportedError, match=r"made of a quantized checkpoint \(Fp8Dequantize\).*original_format=False"
    ):
        model.save_pretrained(nowhere)
    assert not Path(nowhere).exists()


def test_missing_ranks(pool, tmp_path):
    pool.run(_missing, str(tmp_path), world=3)


def _missing(folder: str) -> None:
    reference, rank = (
        build(num_hidden_layers=1, **{**ODD, "num_attention_heads": 6, "hidden_size": 48}),
        dist.get_rank(),
    )
    model = shard(copy.deepcopy(reference), dp=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_barrier, "limit_of_waiting", lambda: 0.5)
        for callers in ((0,), (1, 2), (2,)):
            # Each time the others come when these have given up already, and in turn wait in vain.
            for group in (callers, tuple(set(range(3)) - set(callers))):
                if rank in group:
                    others = sorted(set(range(3)) - set(group))
                    with pytest.raises(
                        MissingRanksError, match=f"did not come: {', '.join(map(str, others))}"
                    ) as caught:
                        model.save_pretrained(folder)
                    assert caught.value.missing == tuple(others)
                dist.barrier()
        assert not names_in(folder)
        patch.setattr(store_barrier, "limit_of_waiting", lambda: 10.0)
        time.sleep(0.2 * rank)  # late, but in time
        model.save_pretrained(folder)
    assert_saved(folder, weights(reference))


@pytest.mark.parametrize("moment", ["file", "disk", "config"])
def test_failure_of_the_writer(pool, tmp_path, moment):
    pool.run(_failure, str(tmp_path), moment, timeout=30)


def _failure(folder: str, moment: str) -> None:
    old, new, rank = build(seed=1, **ODD), build(seed=2, **ODD), dist.get_rank()
    shard(copy.deepcopy(old)).save_pretrained(f"{folder}/model", max_shard_size=30_000)
    before = names_in(f"{folder}/model")
    model = shard(copy.deepcopy(new))
    place, full = f"{folder}/model", OSError(errno.ENOSPC, "No space left on device")
    calls: list[Any] = []

    def save_file(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise full
        native(*args, **kwargs)

    def save_config(*args: Any, **kwargs: Any) -> None:
        raise full

    native = _saving.save_file
    with pytest.MonkeyPatch.context() as patch:
        match moment:
            case "file":
                place = f"{folder}/model/config.json"
            case "disk":
                patch.setattr(_saving, "save_file", save_file)
            case "config":
                patch.setattr(type(model.config), "save_pretrained", save_config)
        expected, text = (
            (OSError, None) if rank == 0 else (AgreementError, "rank 0 failed to save the model. Its error: ")
        )
        with pytest.raises(expected, match=text) as caught:
            model.save_pretrained(place, max_shard_size=30_000)
        assert ("File exists" if moment == "file" else "No space left") in str(caught.value)
    dist.barrier()
    assert names_in(f"{folder}/model") == before
    assert_saved(f"{folder}/model", weights(old))
    model.save_pretrained(f"{folder}/model", max_shard_size=30_000)
    assert_saved(f"{folder}/model", weights(new))


def test_place_of_is_how_fsdp_cuts():
    strided = {tp: (_StridedShard(0, split_factor=tp), Shard(0)) for tp in (2, 3, 4)}
    for rows in (1, 5, 12, 31, 97, 101):
        for tp, placements in strided.items():
            for dp in (2, 3, 5):
                indices = torch.arange(rows)
                for t, outer in enumerate(indices.chunk(tp)):
                    for d, inner in enumerate(outer.chunk(dp)):
                        ((start, stop), _) = place_of((rows, 7), (dp, tp), placements, (d, t))
                        assert torch.equal(indices[start:stop], inner), (rows, tp, dp)
    assert place_of((4, 9), (2, 2), (Shard(1), Shard(0)), (1, 0)) == ((0, 2), (5, 9))


def barriers() -> list[int]:
    """Number of keys in the store after some barriers, and after many more."""
    store = dist.distributed_c10d._get_default_store()
    counted = []
    for number in range(40):
        barrier = WriterBarrier.wait([0, 1], {"number": number}, "save_pretrained", patience=10.0)
        assert {rank: report["number"] for rank, report in barrier.reports.items()} == {0: number, 1: number}
        if dist.get_rank() == 0:
            with barrier.telling():
                barrier.proceed()
            # The store may end with this process: it goes on when its last word was heard.
            assert store.add(f"{barrier.name}/followed", 0) == 2
        else:
            barrier.follow(0)
            time.sleep(0.3 if number == 0 else 0)
            barrier.follow(0)
        if number in (5, 39):
            dist.barrier()
            counted.append(store.num_keys())
            dist.barrier()
    return counted


def test_barriers_leave_nothing_in_the_store(pool):
    for few, many in pool.run(barriers, world=2):
        assert many <= few
