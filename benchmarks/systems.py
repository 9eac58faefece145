"""The systems that are compared: one Llama, unsharded and under each kind of tensor parallelism."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

__all__ = [
    "BATCHES",
    "COMPILED",
    "PER_BLOCK",
    "SHAPES",
    "STEPS",
    "SYSTEMS",
    "UNSHARDED",
    "UNSHARDED_COMPILED",
    "compile_layers",
    "llama",
    "missing",
    "parallelize_blocks",
    "quiet",
]

SHAPES: dict[str, dict[str, int]] = {
    "main": {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 2752,
        "vocab_size": 8192,
    },
    "host-bound": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
    },
}
BATCHES = {"main": (4, 128), "host-bound": (1, 16)}  # (rows, tokens)
STEPS = {"main": 1, "host-bound": 20}  # steps timed together in one round


def missing() -> str | None:
    """Say which library is missing and how to get it, or return None."""
    needs = {
        "transformers": "the models",
        "accelerate": "transformers' tensor parallelism, which loads with device_map",
        "shardcore": "the system under test (pip install -e shardcore)",
        "shard_llama": "the policy (pip install -e packs/shard-llama)",
    }
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    lines = [f"  {name}: {needs[name]}" for name in lacking]
    names = " ".join(name for name in lacking if not name.startswith("shard"))
    hint = f"\nInstall it with: pip install {names}" if names else ""
    return "\n".join(["this benchmark needs what is not installed:", *lines]) + hint


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars of its own, on two ranks at once."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    yield


def llama(**shape: int) -> Any:
    """Return a Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig(**shape, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
    return LlamaForCausalLM(config)


def _loaded(folder: str, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, **options)


def _shardcore(folder: str, **fields: Any) -> nn.Module:
    import shard_llama.policy
    import shardcore

    policy = shard_llama.policy.LlamaPolicy
    sharded: nn.Module = shardcore.shard(_loaded(folder), tp=dist.get_world_size(), policy=policy, **fields)
    return sharded


def compile_layers(model: Any) -> None:
    """Make one graph of each layer, which all layers share, as training scripts do it."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True)


def _transformers(folder: str) -> nn.Module:
    from transformers import DistributedConfig

    model: nn.Module = _loaded(folder, distributed_config=DistributedConfig(tp_size=dist.get_world_size()))
    return model


def _torch_per_linear(folder: str) -> nn.Module:
    return _torch(_loaded(folder), {})


def _torch_per_block(folder: str) -> nn.Module:
    return _torch(_loaded(folder), PER_BLOCK)


def _torch(model: Any, entries: dict[str, Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_blocks(model.model.layers, mesh, entries)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model.model.embed_tokens, mesh, RowwiseParallel(input_layouts=Replicate()))
    return model  # type: ignore[no-any-return]  # a transformers model


#: Activations become DTensors once for each block, instead of in each linear.
PER_BLOCK: dict[str, Any] = {
    "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
}


def parallelize_blocks(blocks: Iterable[nn.Module], mesh: DeviceMesh, entries: Mapping[str, Any]) -> None:
    """Divide the linears of Llama's blocks by torch's plan; ``entries`` are added to the plan of each block."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for block in blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, plan | dict(entries))


UNSHARDED = "unsharded"
UNSHARDED_COMPILED = "unsharded, compiled"
_SPLIT = {"parallel_output": True}

#: How each system makes its model from a folder with an unsharded checkpoint; called on every rank.
SYSTEMS: dict[str, Callable[[str], nn.Module]] = {
    UNSHARDED: _loaded,
    "shardcore": _shardcore,
    "shardcore, split logits": partial(_shardcore, **_SPLIT),
    "shardcore, split logits and sequence": partial(_shardcore, **_SPLIT, enable_sequence_parallelism=True),
    "transformers TP": _transformers,
    "torch per linear": _torch_per_linear,
    "torch per block": _torch_per_block,
    UNSHARDED_COMPILED: _loaded,
    "shardcore, split logits, compiled": partial(_shardcore, **_SPLIT),
}
COMPILED = {UNSHARDED_COMPILED, "shardcore, split logits, compiled"}


def save(folder: Path, size: str) -> None:
    """Write the unsharded checkpoint that every system loads."""
    llama(**SHAPES[size]).save_pretrained(folder)
