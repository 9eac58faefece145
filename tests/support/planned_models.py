"""What one step takes, planned on one rank, and the same step run on real ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers

import shardcore
from shardcore import ShardConfig
from shardcore.config import GradientCheckpointConfig
from shardcore.mesh.context import context_of
from shardcore_planner import Estimate, Workload, estimate
from shardcore_planner.calls import call_of
from shardcore_planner.step import groups_of, run_step
from shardcore_planner.watch import Watch
from shardcore_planner.workload import Stepper
from shardcore_testing.observing import Collectives

LAYERS = 5

#: What gloo runs for each operation; a reduce-scatter of activations travels as an all-to-all.
OPERATIONS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "reduce_scatter",
    "c10d::send": "send",
    "c10d::broadcast_": "broadcast",  # the number from which a call that drops out starts its random stream
}
WORKLOAD = Workload(batch=3, seq=7, dtype="fp32", device="cpu")

_SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "intermediate_size": 45}
_TEXT = {**_SMALL, "vocab_size": 101, "pad_token_id": 0, "max_position_embeddings": 24}
_STACKS = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", LAYERS), ("attention_heads", 4), ("ffn_dim", 45))
}
_SOUND = {
    **_STACKS,
    "d_model": 32,
    "vocab_size": 101,
    "num_mel_bins": 8,
    "max_source_positions": 11,
    "max_target_positions": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "LlamaForCausalLM": _TEXT,
    "LlamaForSequenceClassification": _TEXT,
    "BertForMaskedLM": _TEXT,
    "BertForPreTraining": _TEXT,
    "ViTForImageClassification": {**_SMALL, "image_size": 12, "patch_size": 4},
    "WhisperForConditionalGeneration": _SOUND,
    "WhisperForAudioClassification": {**_SOUND, "classifier_proj_size": 10},
}


def build(name: str) -> Any:
    """Return a tiny model with blocks enough that most of them are left out of a trace."""
    if name == "timm":
        import timm

        model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=LAYERS, num_heads=4)
        return model.train()
    cls = getattr(transformers, name)
    return cls(cls.config_class(**CONFIGS[name])).train()


def config_of(**fields: Any) -> ShardConfig:
    """Return the configuration of one comparison; ``checkpointing=True`` recomputes every block."""
    if fields.pop("checkpointing", False):
        fields["gradient_checkpoint_config"] = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    return ShardConfig.of(**fields)


def planned(name: str, workload: Workload = WORKLOAD, **fields: Any) -> Estimate:
    """Return the plan."""
    with torch.device("meta"):
        model = build(name)
    return estimate(model, config_of(**fields), workload, call_of)


def ran(name: str, workload: Workload = WORKLOAD, **fields: Any) -> tuple[Counter[Any], Counter[Any]]:
    """Run the step on this rank; return what was seen of it, and its collectives as the conformance kit counts them."""
    torch.manual_seed(0)
    model = build(name)
    if workload.lora:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=workload.lora, target_modules="all-linear"), model)
    shardcore.shard(model, config_of(**fields))
    stepper = Stepper(model, workload)
    found = run_step(model, call_of(model, workload), stepper, workload, Watch())
    axes = groups_of(context_of(model))
    for key in [key for key in found if key[0] == "sent"]:
        found["sent", key[1], key[2], axes[key[3]][0], key[4]] += found.pop(key)
    with Collectives() as seen:
        call = call_of(model, workload)
        call.loss(call.forward(model, call.inputs())).backward()
        stepper.step()
    kit: Counter[Any] = Counter()
    for operation, size in zip(seen.names, seen.bytes, strict=True):
        if operation.startswith("c10d::recv"):
            continue  # the other end of a send
        kit[OPERATIONS[operation], "count"] += 1
        kit[OPERATIONS[operation], "bytes"] += size
    return found, kit


def by_kind(estimate: Estimate) -> Counter[Any]:
    """Return the collectives of a plan by phase, operation and axis."""
    found: Counter[Any] = Counter()
    for t in estimate.traffic:
        found["sent", t.phase, t.operation, t.axis, "count"] += t.count
        found["sent", t.phase, t.operation, t.axis, "bytes"] += t.bytes
    return found


def by_operation(estimate: Estimate) -> Counter[Any]:
    """Return the collectives of a plan by operation; by its name nobody can tell an all-to-all from gloo's scatter."""
    found: Counter[Any] = Counter()
    for (*_, operation, _, unit), size in by_kind(estimate).items():
        found["reduce_scatter" if operation == "all_to_all" else operation, unit] += size
    return found
