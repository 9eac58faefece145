"""What a step keeps on a card, against what was measured on one: an H200, torch 2.11 (docs/gpu.md)."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardcore.config import ShardConfig
from shardcore_planner import Call, Card, Workload, estimate
from shardcore_planner.calls import call_of
from shardcore_planner.simulation import holding_nothing
from shardcore_planner.watch import Watch

MIB, GIB = 2**20, 2**30
LLAMA_3_8B = {
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_implementation": "sdpa",
    "use_cache": False,
}
#: What was measured had the norms of transformers, which are fused by default now.
WRITTEN_OUT = {"enable_fused_normalization": False}


class _Ones(torch.autograd.Function):
    """Ends a model with ``out.backward(torch.ones_like(out))``, where both have names that last until it returns."""

    held: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, out):
        _Ones.held[:] = [out.detach()]
        return out.new_empty(())

    @staticmethod
    def backward(ctx, gradient):
        _Ones.held.append(torch.ones_like(_Ones.held[0]))
        return _Ones.held[1]


def _llama(head, **sizes):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("shard_llama")
    config = transformers.LlamaConfig(**LLAMA_3_8B, **sizes)
    with torch.device("meta"):
        return getattr(transformers, head)(config)


@pytest.mark.parametrize(
    ("fields", "measured", "bound"),
    [
        (WRITTEN_OUT, 1529, 0.005),
        ({"enable_fused_normalization": True}, 680, 0.01),
        (WRITTEN_OUT | {"enable_sequence_parallelism": True}, 538, 0.05),
    ],
    ids=str,
)
def test_four_blocks_of_a_rank_of_eight(fields, measured, bound):
    shape = 1, 4096, 4096

    def call(_model, _workload):
        return Call(
            inputs=lambda: {"inputs_embeds": torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)},
            loss=lambda out: _Ones.apply(out.last_hidden_state),
            seq=4096,
        )

    model = _llama("LlamaModel", vocab_size=128, num_hidden_layers=4)
    config = ShardConfig(tensor_parallel_size=8, **fields)
    found = estimate(model, config, Workload(dtype="bf16", optimizer="sgd"), call)
    # Measured was what is above the memory between steps: there are the gradients of the last one, and the inputs.
    before = found.held["gradients"] + 4096 * 4096 * 2
    above = found.at_peak["activations"] + found.at_peak["gradients"] - before
    assert above == pytest.approx(measured * MIB, rel=bound)


@pytest.mark.parametrize(
    ("fields", "tokens", "measured"),
    [
        (WRITTEN_OUT, 4096, 19.3),
        ({"enable_fused_normalization": True}, 512, 17.7),
        (WRITTEN_OUT | {"enable_sequence_parallelism": True}, 16, 25.7),
    ],
    ids=str,
)
def test_four_blocks_of_a_rank_of_eight_on_a_card(fields, tokens, measured):
    def call(_model, _workload):
        shape = 1, tokens, 4096
        return Call(
            inputs=lambda: {"inputs_embeds": torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)},
            loss=lambda out: _Ones.apply(out.last_hidden_state),
            seq=tokens,
        )

    model, card = _llama("LlamaModel", vocab_size=128, num_hidden_layers=4), Card.of("h200")
    config = ShardConfig(tensor_parallel_size=8, **fields)
    found = estimate(model, config, Workload(dtype="bf16", optimizer="sgd", card=card), call)
    phases = ("forward", "backward")
    times = [card.computing(found.device[phase], found.calls[phase] * card.call) for phase in phases]
    assert 1e3 * sum(times) == pytest.approx(measured, rel=0.15)


def test_what_is_recomputed_is_one_kernel_too():
    with holding_nothing("cuda"):
        x = torch.empty(2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
        out = checkpoint(lambda x: F.dropout(F.rms_norm(x, (8,), weight), 0.5), x, use_reentrant=False)
        out.sum().backward()  # which says so if other tensors are kept
    assert weight.grad.shape == (8,)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        ({}, 37.80),
        ({"parallel_output": True}, 27.29),
        ({"parallel_output": True, "loss_chunk_size": 1024, "enable_sequence_parallelism": True}, 15.88),
    ],
    ids=str,
)
def test_a_rank_of_eight_with_adamw(fields, measured):
    model = _llama("LlamaForCausalLM", vocab_size=128256, num_hidden_layers=32)
    config = ShardConfig(tensor_parallel_size=8, **WRITTEN_OUT, **fields)
    found = estimate(model, config, Workload(seq=8192, dtype="bf16"), call_of)
    assert found.peak == pytest.approx(measured * GIB, rel=0.005)


@pytest.mark.parametrize(
    ("device", "operation", "kept"),
    [
        ("cpu", lambda x: F.dropout(x, 0.5), 64 * 64 * 4),
        ("cuda", lambda x: F.dropout(x, 0.5), 64 * 64),
        ("cuda", lambda x: F.dropout(x, 0.0), 0),
        ("cuda", lambda x: F.rms_norm(x, (16,)), 4 * 64 * 4),
        ("cuda", lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5), 4 * 64 * 4),
    ],
    ids=["mask of the CPU", "mask", "no dropout", "norm", "attention"],
)
def test_what_an_operation_keeps_beside_its_input_and_its_output(device, operation, kept):
    with holding_nothing(device) as fake:
        x = torch.empty(1, 4, 64, 16, requires_grad=True)
        with Watch(fake) as watch:
            out = operation(x)
        del operation
        seen = watch.now()["all"] - x.nbytes - (0 if out is x else out.nbytes)
        out.sum().backward()
    assert (seen, x.grad.shape) == (kept, x.shape)


def test_attention_that_drops_out_keeps_no_scores_on_a_card():
    def scores(device, p):
        with holding_nothing(device) as fake, Watch(fake) as watch:
            x = torch.empty(1, 4, 64, 8, requires_grad=True)
            out = F.scaled_dot_product_attention(x, x, x, dropout_p=p)
        del out
        return watch.peaks["forward", "", "all"]

    assert scores("cuda", 0.5) == scores("cuda", 0.0) < scores("cpu", 0.5)
