"""What a plugin says of itself, before any model: what cannot be is refused, every setting can be given."""

from __future__ import annotations

import dataclasses

import pytest

from shardcore import ShardConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_shardformer import HybridParallelPlugin


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"pp_size": 2, "zero_stage": 2}, NotSupportedError, "zero_stage=2.* with a pipeline does not exist"),
        ({"pp_size": 2, "zero_stage": 3, "pp_style": "zbv"}, NotSupportedError, "use zero_stage=1"),
        ({"sp_size": 2}, NotSupportedError, "other than tp_size 1"),
        ({"tp_size": 2, "sp_size": 2}, ConfigError, "enable_sequence_parallelism=True; give both"),
        (
            {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
            ConfigError,
            "needs the number of ranks that divide each sequence: HybridParallelPlugin",
        ),
        ({"zero_stage": 4}, ConfigError, "must be 0, 1, 2 or 3"),
        ({"precision": "int8"}, ConfigError, "one of fp32, bf16, fp16"),
        ({"tp_size": 0}, ConfigError, "must be a positive integer"),
        ({"pp_size": 2, "pp_style": "2f2b"}, ConfigError, "pipeline_schedule must be one of"),
        ({"pp_size": 2, "num_microbatches": 2, "microbatch_size": 1}, ConfigError, "give one of them"),
        ({"max_norm": -1.0}, ConfigError, "at least 0"),
        ({"initial_scale": 0.0}, ConfigError, "must be positive"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        HybridParallelPlugin(**options)


def test_replicas_of_a_job_that_has_not_begun(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert HybridParallelPlugin(tp_size=2, pp_size=2).replicas == 2
    assert HybridParallelPlugin(tp_size=2, pp_size=2, dp_size=1).replicas == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert HybridParallelPlugin(tp_size=2, pp_size=2).replicas == 1


def test_every_setting_of_a_configuration_can_be_given():
    # Who shares a model is said by sizes, and what only calls without a backward need is no training.
    left = {
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size",
        "dp_replicate_size", "dp_shard_size", "context_parallel_size", "pipeline_schedule",
        "tensor_parallel_process_group", "device_mesh",
        "inference_only",
    }  # fmt: skip
    for field in dataclasses.fields(ShardConfig):
        value = {} if field.name == "extra_kwargs" else field.default
        if field.name in left:
            with pytest.raises(ConfigError, match=rf"HybridParallelPlugin\({field.name}=\) is not said here"):
                HybridParallelPlugin(**{field.name: value})
        else:
            assert HybridParallelPlugin(**{field.name: value}).config() == HybridParallelPlugin().config()
    with pytest.raises(ConfigError, match=r"unknown configuration field 'parallel_ouput'\. Did you mean"):
        HybridParallelPlugin(parallel_ouput=True)
    plugin = HybridParallelPlugin(parallel_output=True, loss_chunk_size=8, sequence_keep_gathered=False)
    assert (plugin.config().loss_chunk_size, plugin.config().sequence_keep_gathered) == (8, False)
    assert (
        dataclasses.replace(plugin, zero_stage=1).config()
        != plugin.config()
        == HybridParallelPlugin(gather_output=False, loss_chunk_size=8, sequence_keep_gathered=False).config()
    )
    assert dict(HybridParallelPlugin(extra_kwargs={"a": 1}).config().extra_kwargs) == {"a": 1}


@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_sequences_that_ranks_of_their_own_divide(mode):
    plugin = HybridParallelPlugin(sp_size=4, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    config = plugin.config()
    assert (config.context_parallel_size, config.context_parallel_mode) == (4, mode)
    assert config.enable_sequence_parallelism is False


def test_a_plugin_is_replaced():
    mode = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}
    plugin = dataclasses.replace(HybridParallelPlugin(sp_size=4, **mode), sp_size=2)
    assert plugin == HybridParallelPlugin(sp_size=2, **mode)
