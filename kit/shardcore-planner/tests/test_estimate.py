"""A few blocks of each kind stand for all of them, and a plan says what the trace of the whole model says."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from needs import PIPELINES
from tiny import TinyPolicy, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

import shardcore
from shardcore._torch import CAN_TRACE
from shardcore.config import GradientCheckpointConfig, ShardConfig
from shardcore.errors import ConfigError, NotSupportedError, PlanError
from shardcore.mesh.axes import Sizes
from shardcore_planner import Call, Workload, estimate, layers, simulated_ranks
from shardcore_planner.calls import call_of
from shardcore_planner.estimating import least
from shardcore_planner.results import Traffic
from shardcore_planner.search import cost, meshes, ordered, search
from shardcore_planner.simulation import holding_nothing
from shardcore_planner.watch import Watch

WORK = Workload(batch=3, dtype="fp32", device="cpu")


def call(model, workload):
    return Call(
        inputs=lambda: {"": torch.ones(workload.batch, 7, dtype=torch.long)}, loss=lambda out: out.float().sum(), seq=7
    )


def meta(count=7, **options):
    return build(vocab=96, layers=count, **options).to("meta")


def plan(model, work=WORK, **fields):
    return estimate(model, ShardConfig.of(**fields), work, call, policy=TinyPolicy)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2},
        {"tp": 2, "dp_shard_size": 2},
        {"tp": 1, "dp_shard_size": 2, "dp_replicate_size": 2},
        {"tp": 2, "partial_gradients": "deferred"},
    ],
    ids=str,
)
def test_few_blocks_stand_for_all(monkeypatch, fields):
    found = plan(meta(), **fields)
    monkeypatch.setattr(layers, "LEAST", 7)
    assert found == plan(meta(), **fields)


def test_few_blocks_stand_for_all_without_a_backward(monkeypatch):
    work = Workload(batch=3, dtype="fp32", optimizer="none")
    found = plan(meta(), work, tp=2)
    monkeypatch.setattr(layers, "LEAST", 7)
    assert found == plan(meta(), work, tp=2)


@pytest.mark.nightly
def test_blocks_of_different_kinds_are_told_apart(monkeypatch):
    model = meta()
    for index in (1, 4):
        model.model.layers[index].mlp.drop.p = 0.1
    kinds = layers.kinds_of(model, ["model.layers"])
    assert [kind.indices for kind in kinds] == [(0, 2, 3, 5, 6), (1, 4)]
    assert layers.kept(kinds) == {"model.layers": [0, 1, 4, 5, 6]}
    assert layers.kept(kinds, kinds[0]) == {"model.layers": [0, 1, 2, 4, 5, 6]}
    found = plan(model, tp=2)
    monkeypatch.setattr(layers, "LEAST", 7)
    assert found == plan(model, tp=2)


@pytest.mark.nightly
def test_blocks_of_different_kinds_take_turns(monkeypatch):
    model, work = meta(13), Workload(dtype="fp32", device="cpu")
    for index in (3, 7, 11):
        model.model.layers[index].mlp.drop.p = 0.1
    found = plan(model, work, tp=2)
    monkeypatch.setattr(layers, "LEAST", 13)
    assert found == plan(model, work, tp=2)


def test_blocks_that_are_recomputed_are_another_kind():
    names = ["model.layers.0", "model.layers.1"]
    kinds = layers.kinds_of(meta(4), ["model.layers"], names)
    assert [kind.indices for kind in kinds] == [(0, 1), (2, 3)]


@pytest.mark.nightly
def test_live_dropout_keeps_its_masks():
    dry, wet = plan(meta(dropout=0.0), tp=2), plan(meta(dropout=0.1), tp=2)
    assert wet.kept > dry.kept
    # A number by which ranks know the call to be one.
    number = Traffic(phase="forward", operation="broadcast", axis="tp", ranks=2, count=1, bytes=8)
    assert [found for found in wet.traffic if found != number] == [*dry.traffic]
    assert number in wet.traffic


@pytest.mark.nightly
def test_what_each_optimizer_holds():
    model = meta(3)
    held = {name: plan(model, Workload(dtype="bf16", optimizer=name), tp=2).held for name in ("adamw", "sgd")}
    numbers = held["adamw"]["parameters"] // 2
    assert held["sgd"] == {"parameters": 2 * numbers, "gradients": 2 * numbers, "optimizer": 0}
    steps = 4 * sum(1 for _ in model.parameters())
    assert held["adamw"]["optimizer"] == 4 * numbers + steps
    master = plan(model, Workload(dtype="bf16", master_weights=True), tp=2)
    assert master.held["optimizer"] == 12 * numbers + steps
    alone = plan(model, Workload(dtype="bf16", optimizer="none"), tp=2)
    assert alone.held == {"parameters": 2 * numbers, "gradients": 0, "optimizer": 0}
    assert {t.phase for t in alone.traffic} == {"forward"}


@pytest.mark.skipif(not CAN_TRACE, reason="before torch 2.13 a simulated step holds more temporaries than a real one")
def test_temporaries_are_those_of_optimizers_that_step_all_parameters_at_once():
    found = {name: plan(meta(3), Workload(batch=1, optimizer=name), tp=2) for name in ("adamw", "adamw-fused")}
    assert found["adamw"].peak_phase == "optimizer"
    assert found["adamw"].at_peak["temporaries"] == found["adamw"].held["parameters"]
    assert found["adamw-fused"].held == found["adamw"].held
    assert found["adamw-fused"].peak_phase == "backward"


def test_the_least_is_what_is_held_in_the_dtype_of_the_workload():
    work = Workload(dtype="bf16", optimizer="sgd")
    config = ShardConfig.of(tp=2)
    model = meta(3)
    assert next(model.parameters()).dtype != torch.bfloat16
    found = plan(model, work, tp=2)
    assert least(model, config, work, policy=TinyPolicy) == sum(found.held.values()) <= found.peak


@pytest.mark.nightly
def test_a_search_lists_what_fits_by_what_a_sample_sends():
    assert list(meshes(4, 2)) == [
        Sizes(tp=1, dp_replicate=1, dp_shard=4),
        Sizes(tp=1, dp_replicate=2, dp_shard=2),
        Sizes(tp=1, dp_replicate=4, dp_shard=1),
        Sizes(tp=2, dp_replicate=1, dp_shard=2),
        Sizes(tp=2, dp_replicate=2, dp_shard=1),
    ]
    look = {"ranks": 4, "max_tp": 4, "policy": TinyPolicy}
    found = list(search(meta(3), ShardConfig(), WORK, call, **look))
    best = ordered(found, None)
    assert [cost(f) for f in best] == sorted(cost(f) for f in found)
    limit = min(f.estimate.peak for f in found)
    small = list(search(meta(3), ShardConfig(), WORK, call, memory=limit, **look))
    assert [f.sizes for f in ordered(small, limit)] == [f.sizes for f in found if f.estimate.peak == limit]
    assert any("alone take" in f.problem for f in small)


@pytest.mark.nightly
def test_a_mesh_that_cannot_be_is_left_out_with_its_reason():
    found = list(search(meta(3), ShardConfig(), WORK, call, ranks=3, max_tp=3, policy=TinyPolicy))
    problems = {f.sizes.tp: f.problem for f in found if f.estimate is None}
    assert list(problems) == [3]
    assert "8" in problems[3]
    with pytest.raises(PlanError):
        plan(meta(3), tp=3)


def test_the_model_and_the_process_are_left_as_they_were():
    model = meta(3)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    plan(model, tp=2, dp_shard_size=2)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_are_not_simulated_where_there_are_real_ones():
    with simulated_ranks(2), pytest.raises(ConfigError, match="has a process group"), simulated_ranks(4):
        pass
    assert not dist.is_initialized()


def test_a_forward_that_fails_on_tensors_that_hold_nothing_is_an_error():
    called = call(None, WORK)
    with pytest.raises(NotSupportedError, match=r"a step of Bilinear cannot be planned: .* \(TypeError: "):
        called.forward(torch.nn.Bilinear(1, 1, 1), called.inputs())


def test_simulated_ranks_leave_the_hook_of_errors():
    before = sys.excepthook
    with simulated_ranks(2):
        pass
    assert sys.excepthook is before


def test_the_rank_that_was_simulated_is_forgotten():
    """A process that has planned joins others, and may be another rank of as many: it holds that one's parts."""
    for rank in (0, 1):
        with simulated_ranks(2, rank):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            weight = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
            for made in (weight.detach(), torch.empty_like(weight), weight + 1):
                assert made.device_mesh.get_coordinate() == (rank,)


def test_a_model_is_sharded_among_simulated_ranks():
    for rank in (0, 3):
        model = meta(3)
        with simulated_ranks(4, rank):
            shardcore.shard(model, tp=4, policy=TinyPolicy)
            assert model.head.weight.to_local().shape == (24, 32)
            assert model.head.weight.is_meta


@pytest.mark.nightly
def test_partly_recomputed_blocks_are_planned():
    config = GradientCheckpointConfig(num_ckpt_layers=4)
    some = plan(meta(), tp=2, gradient_checkpoint_config=config)
    none, all_ = (
        plan(meta(), tp=2, gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=n)) for n in (0, 7)
    )
    assert 7 * (none.kept - some.kept) == 4 * (none.kept - all_.kept) > 0


def test_experts_in_a_dtype_for_which_torch_tells_no_shapes():
    with holding_nothing("cpu"):
        rows, experts = torch.empty(6, 4, requires_grad=True), torch.empty(2, 4, 8, requires_grad=True)
        out = F.grouped_mm(rows, experts, offs=torch.empty(2, dtype=torch.int32))
        out.sum().backward()
    assert (out.shape, rows.grad.shape, experts.grad.shape) == ((6, 8), (6, 4), (2, 4, 8))


def test_a_watch_sees_what_comes_and_goes():
    watch = Watch()
    kept = torch.zeros(100)
    watch.owns("parameters", [kept])
    with watch:
        big = torch.zeros(1000)
        del big
        small = kept + 1
    assert watch.now() == {"parameters": 400, "activations": 400, "all": 800}
    assert watch.peaks["forward", "", "all"] == 4400
    del small


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "int8"}, "Workload.dtype"),
        ({"optimizer": "lion"}, "Workload.optimizer"),
        ({"batch": 0}, "Workload.batch"),
        ({"device": "tpu"}, "Workload.device"),
        ({"optimizer": "none", "master_weights": True}, "master_weights"),
    ],
)
def test_workloads_that_are_none(fields, said):
    with pytest.raises(ConfigError, match=said):
        Workload(**fields)


def pipelined(model, batch=8, optimizer="adamw", **fields):
    def by_name(model, workload):
        ids = torch.ones(workload.batch, 7, dtype=torch.long, device="cpu")
        return Call(inputs=lambda: {"": torch.ones_like(ids)}, loss=lambda out: out.float().sum(), seq=7)

    work = Workload(batch=batch, dtype="fp32", device="cpu", optimizer=optimizer)
    settings = {"pp": 2, "tp": 1, "dp": 1, "num_microbatches": 4, **fields}
    return estimate(model, ShardConfig.of(**settings), work, by_name, policy=TinyPolicy)


@pytest.mark.nightly
@PIPELINES
@pytest.mark.parametrize(
    ("fields", "count"),  # so many that more than `LEAST` of each kind are in a stage
    [
        ({}, 10),
        ({"tp": 2, "pipeline_schedule": "interleaved"}, 16),
        ({"dp_shard_size": 2, "dp": None}, 10),
        ({"optimizer": "none"}, 10),
        ({"gradient_checkpoint_config": GradientCheckpointConfig(num_ckpt_layers=5)}, 14),
    ],
    ids=str,
)
def test_few_blocks_of_a_stage_stand_for_all(monkeypatch, fields, count):
    assert layers.LEAST == 3
    found = pipelined(meta(count), **fields)
    monkeypatch.setattr(layers, "LEAST", count)
    monkeypatch.setattr("shardcore_planner.pipelines.LEAST", count)
    assert found == pipelined(meta(count), **fields)


@pytest.mark.nightly
@PIPELINES
def test_more_micro_batches_take_what_the_schedule_keeps():
    model = meta(6)
    few, many = (pipelined(model, batch=2 * n, num_microbatches=n).pipeline for n in (4, 8))
    assert [rank.kept for rank in few.ranks] == [rank.kept for rank in many.ranks]  # 1F1B keeps one for each stage
    assert [2 * rank.buffers for rank in few.ranks] == [rank.buffers for rank in many.ranks]
    (small, large) = (
        pipelined(model, batch=2 * n, num_microbatches=n, pipeline_schedule="gpipe").pipeline for n in (4, 8)
    )
    assert [2 * rank.kept for rank in small.ranks] == [rank.kept for rank in large.ranks]
    assert few.bubble > many.bubble


@PIPELINES
def test_the_least_of_a_pipeline_is_that_of_its_ranks():
    work, config = Workload(batch=4, dtype="fp32", optimizer="sgd"), ShardConfig.of(pp=2, tp=1, num_microbatches=4)
    found = pipelined(meta(5), batch=4, optimizer="sgd")
    assert least(meta(5), config, work, policy=TinyPolicy) == max(sum(r.held.values()) for r in found.pipeline.ranks)


def _operations(attention):
    """Return what torch counts in a step of a Llama, forward and backward, and the model on meta."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("shard_llama")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": attention}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    ids = torch.ones(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return model.to("meta"), {"forward": forward.get_total_flops(), "backward": backward.get_total_flops()}


def test_operations_are_those_that_torch_counts_of_the_unsharded_model():
    model, counted = _operations("eager")
    work = Workload(batch=2, seq=16, device="cpu")
    for tp in (1, 2):
        found = estimate(model, ShardConfig.of(tp=tp), work, call_of)
        assert {phase: tp * count for phase, count in found.operations.items()} == counted
    recomputes = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    again = estimate(model, ShardConfig.of(tp=1, gradient_checkpoint_config=recomputes), work, call_of).operations
    # Neither the head nor what a block ends with is computed again: no gradient needs it.
    once = 2 * (2 * 16) * (32 * 96 + 5 * 64 * 32)
    assert again == {"forward": counted["forward"], "backward": counted["backward"] + counted["forward"] - once}


def test_attention_on_cpus_is_counted_too():
    (_, eager), (model, _) = _operations("eager"), _operations("sdpa")
    found = estimate(model, ShardConfig.of(tp=2), Workload(batch=2, seq=16, device="cpu"), call_of).operations
    assert 2 * found["forward"] == eager["forward"]
    scores = 5 * 2 * 4 * 2 * 16 * 16 * 8  # layers, rows, heads: computed again in the backward
    assert 2 * found["backward"] == eager["backward"] + scores


@PIPELINES
def test_the_operations_of_a_pipeline_are_those_of_all_its_stages():
    model, counted = _operations("eager")
    config = ShardConfig.of(pp=2, tp=1, num_microbatches=2)
    ranks = estimate(model, config, Workload(batch=2, seq=16, device="cpu"), call_of).pipeline.ranks
    assert {phase: sum(rank.operations[phase] for rank in ranks) for phase in counted} == counted


def test_a_copy_of_few_blocks_leaves_the_hooks_of_the_model():
    model = meta(3)
    few = layers.truncated(model, {"model.layers": [0]})
    few.model.layers.register_forward_hook(lambda *_: None)
    assert not model.model.layers._forward_hooks
