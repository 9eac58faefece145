"""Saving a part of a sharded model, the caller's own state dict, and models that others call distributed."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from llama_cases import batch, build, shard
from packaging.version import Version
from saving_files import DP2, ODD, SQUARE, TIED, TP2, assert_saved, names_in, saved, weights
from transformers import PreTrainedModel

from shardcore import AgreementError, MissingRanksError, NotSupportedError
from shardcore._private import PrivateName
from shardcore.agree import store_barrier
from shardcore_testing.parity import whole
from shardcore_transformers import _private

pytestmark = pytest.mark.newest

LAYOUTS = {"tp2": TP2, "dp2": DP2, "tp2-dp2": SQUARE}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_is_saved_as_the_unsharded_one(pool, tmp_path, layout):
    pool.run(_part, str(tmp_path), LAYOUTS[layout], world=4 if layout == "tp2-dp2" else 2)


def _part(folder: str, axes: dict[str, int]) -> None:
    reference = build(**TIED)
    model = shard(copy.deepcopy(reference), **axes)
    model(**batch(reference))  # FSDP2 leaves the root's parameters gathered
    ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
    model.model.save_pretrained(ours, max_shard_size=20_000)
    if dist.get_rank() == 0:
        reference.model.save_pretrained(theirs, max_shard_size=20_000)
        assert names_in(ours) == names_in(theirs)
        assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
        assert_saved(ours, saved(theirs))
        assert '"LlamaModel"' in (ours / "config.json").read_text()
    model.save_pretrained(f"{folder}/again")
    assert_saved(f"{folder}/again", weights(reference))
    assert '"LlamaForCausalLM"' in Path(folder, "again", "config.json").read_text()
    with pytest.raises(NotSupportedError, match="resize_token_embeddings"):
        model.model.resize_token_embeddings(120)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_dict_of_parts(pool, tmp_path, layout):
    pool.run(_state_of_parts, str(tmp_path), LAYOUTS[layout], world=4 if layout == "tp2-dp2" else 2)


def _state_of_parts(folder: str, axes: dict[str, int]) -> None:
    reference = build(**TIED)
    model = shard(copy.deepcopy(reference), **axes)
    model.save_pretrained(f"{folder}/all", state_dict=model.state_dict(), max_shard_size=20_000)
    assert_saved(f"{folder}/all", weights(reference))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_barrier, "limit_of_waiting", lambda: 0.5)
        if dist.get_rank() == 0:  # an error that names the others, not a collective that they never join
            with pytest.raises(MissingRanksError, match="did not come: 1"):
                model.save_pretrained(f"{folder}/alone", state_dict=model.state_dict())
    dist.barrier()
    assert not Path(folder, "alone").exists()
    state = model.state_dict()
    state["lm_head.weight"] = state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"] + 1
    model.save_pretrained(f"{folder}/changed", state_dict=state, is_main_process=dist.get_rank() == 1)
    wanted = {**weights(reference), "model.embed_tokens.weight": whole(state["lm_head.weight"])}
    assert_saved(f"{folder}/changed", wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_others_call_distributed(pool, tmp_path, layout):
    pool.run(_distributed, str(tmp_path), LAYOUTS[layout], world=4 if layout == "tp2-dp2" else 2, timeout=40)


def _distributed(folder: str, axes: dict[str, int]) -> None:
    reference, rank = build(**ODD), dist.get_rank()
    model = shard(copy.deepcopy(reference), **axes)
    config = SimpleNamespace(tp_size=2, dp_size=axes.get("dp", 1), fsdp_size=axes.get("dp", 1), ep_size=1)
    model._tp_size, model.config.distributed_config = 2, config
    writer = dist.get_world_size() - 1
    model.save_pretrained(f"{folder}/saved", is_main_process=rank == writer, max_shard_size=20_000)
    assert_saved(f"{folder}/saved", weights(reference))
    assert "distributed_config" not in Path(folder, "saved", "config.json").read_text()
    assert model._tp_size == 2
    assert model.config.distributed_config is config
    if rank == 0:  # as the Trainer does
        model.save_pretrained(f"{folder}/given", state_dict=reference.state_dict())
        assert_saved(f"{folder}/given", reference.state_dict())


@pytest.mark.parametrize("used", [_private.ACCELERATE, _private.PEFT, _private.TRANSFORMERS], ids=lambda u: u.library)
def test_the_libraries_have_the_private_names(used):
    pytest.importorskip(used.library)
    assert used.missing() == []


def test_saving_calls_what_is_overridden():
    code = inspect.unwrap(PreTrainedModel.save_pretrained).__code__
    for name, since in _private.OVERRIDDEN.items():
        if Version(transformers.__version__) >= Version(since):
            assert name in code.co_names, f"save_pretrained calls no {name}"
        else:
            assert not hasattr(PreTrainedModel, name), f"{name} is older than {since}"


def test_a_name_that_transformers_lost(pool):
    pool.run(_renamed)


def _renamed() -> None:
    model = shard(build(**ODD))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            gone = PrivateName("transformers.PreTrainedModel._upload_all_files", "saving on one rank", "saving")
            used = replace(_private.TRANSFORMERS, names=(*_private.TRANSFORMERS.names, gone))
            patch.setattr(_private, "require", used.require)
        expected = NotSupportedError if dist.get_rank() == 1 else AgreementError
        with pytest.raises(expected, match=r"has no transformers\.PreTrainedModel\._upload_all_files.*4\.57\.6 to"):
            model.save_pretrained("/nonexistent/folder")


def test_transformers_that_writes_nothing_is_noticed(pool, tmp_path):
    pool.run(_nothing, str(tmp_path / "model"))


def _nothing(folder: str) -> None:
    model: Any = shard(build(**ODD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", _saves_nothing)
        expected = NotSupportedError if dist.get_rank() == 0 else AgreementError
        with pytest.raises(expected, match="wrote no configuration"):
            model.save_pretrained(folder)
    dist.barrier()
    assert not names_in(folder)


def _saves_nothing(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    max_shard_size: Any = "5GB",
    variant: Any = None,
    **kwargs: Any,
) -> None:
    pass
