"""The demo: it passes, it fails on a model that is sharded wrongly, and it learns as much with `fp8_communication`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[1] / "examples"

# A replicated norm of which every rank keeps a part of the gradient, as if the sum over the ranks had been forgotten.
# AdamW divides by the gradient's size, so that the losses hardly move.
FAULT = """
import sys
import shardcore

sys.path.insert(0, sys.argv.pop(1))
import train_llama

shard = shardcore.shard

def shard_wrongly(model, **options):
    model = shard(model, **options)
    norm = model.model.layers[1].post_attention_layernorm
    norm.weight.register_post_accumulate_grad_hook(forget)
    return model

def forget(parameter):
    parameter.grad.to_local().mul_(0.5)

shardcore.shard = shard_wrongly
train_llama.main()
"""


def run(script: Path, *arguments: str) -> tuple[int, str]:
    """Run a script on two ranks; return its exit code and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*command, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    try:
        printed, _ = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.terminate()  # unlike a kill, it lets torchrun stop its ranks
        printed, _ = process.communicate()
        pytest.fail(f"not done after 400 seconds:\n{printed}")
    return process.returncode, printed


@pytest.mark.nightly
def test_demo_passes(tmp_path: Path) -> None:
    code, printed = run(EXAMPLES / "train_llama.py", "--steps", "8", "--output", str(tmp_path))
    assert code == 0, printed
    assert "all 8 checks hold on 2 ranks" in printed
    assert "FAILED" not in printed
    assert "held-out loss: 5.7" in printed
    for check in ("loss of every step", "gradient of every parameter", "greedy bytes, sharded and reloaded"):
        assert any(check in line and "ok" in line for line in printed.splitlines()), printed
    assert (tmp_path / "config.json").exists()
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.nightly
def test_demo_notices_a_wrong_gradient(tmp_path: Path) -> None:
    script = tmp_path / "fault.py"
    script.write_text(FAULT)
    code, printed = run(script, str(EXAMPLES), "--steps", "2")
    assert code != 0, printed
    assert "these checks failed" in printed
    for rank in (0, 1):
        assert f"on rank {rank}: gradient of every parameter, relative (found 5.0e-01 apart" in printed


def trained(axis: str, fp8: bool) -> tuple[float, float]:
    """Train as the demo does; return the mean loss of the last ten steps, and that on held-out text."""
    import torch
    import torch.distributed as dist

    import shardcore

    sys.path.insert(0, str(EXAMPLES))
    import train_llama as demo

    text, ranks = demo.Text.read(), dist.get_world_size()
    torch.manual_seed(0)
    fields: dict[str, Any] = {axis: ranks, "fp8_communication": fp8}
    model: Any = shardcore.shard(demo.LlamaForCausalLM(demo.CONFIG), **fields)
    training, generator = demo.Training(model, demo.STEPS), torch.Generator().manual_seed(0)
    for _ in range(demo.STEPS):
        batch = text.batch(demo.BATCH, demo.LENGTH, generator)
        if axis == "pp":
            training.optimizer.zero_grad()
            training.losses.append(float(model.train_step({"input_ids": batch, "labels": batch})))
            model.clip_grad_norm_(1.0)
            training.optimizer.step()
            training.schedule.step()
        else:
            training.step(batch.chunk(ranks)[dist.get_rank()] if axis == "dp" else batch)
    held_out = text.held_out[: 32 * demo.LENGTH].view(32, -1)
    call = {"input_ids": held_out, "labels": held_out}
    with torch.no_grad():
        judged = model.eval_step(call) if axis == "pp" else model(**call).loss
    return sum(training.losses[-10:]) / 10, float(judged)


def both(axis: str) -> tuple[tuple[float, float], tuple[float, float]]:
    return trained(axis, False), trained(axis, True)


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_it_learns_as_much_with_eight_bits_between_ranks(pool: Any, axis: str) -> None:
    ranks = pool.run(both, axis, world=2, timeout=300)
    for place in (0, 1):  # replicas have losses of their own
        exact, rounded = (sum(losses[way][place] for losses in ranks) / 2 for way in (0, 1))
        assert 0 < abs(rounded - exact) <= 0.01 * exact
