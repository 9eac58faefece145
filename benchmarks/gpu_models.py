"""What ``gpu.py`` measures: blocks of models, and the systems that give one rank its share of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from systems import PER_BLOCK, parallelize_blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore

__all__ = ["FAMILIES", "SYSTEMS", "Family", "System", "blocks_of", "model_of"]


#: Positions of the decoder of Whisper.
_WORDS = 448


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model of which some blocks are measured; rank 0 of ``tp`` ranks has what ``divided`` or ``linears`` say.

    Attributes:
        model: the name of its class, in transformers.
        sizes: fields of its configuration.
        tiny: those that are smaller on a CPU.
        counts: the fields that say how many blocks there are.
        blocks: the paths of the lists of blocks.
        inputs: ``"tokens"`` of any number, an ``"image"``, or ``"sound"`` with tokens beside it.
        divided: fields that "ideal" divides, where the size of a head is a field of its own.
        linears: where it is not: the end of a linear's path -> what of it is divided. The first that fits counts.
        causal: it decodes from a cache.
        dense: it has the linears of Llama, and no others.
    """

    model: str
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]
    counts: tuple[str, ...] = ("num_hidden_layers",)
    blocks: tuple[str, ...] = ("layers",)
    inputs: str = "tokens"
    divided: tuple[str, ...] = ()
    linears: Mapping[str, str] = field(default_factory=dict)
    causal: bool = False
    dense: bool = False

    @property
    def heads(self) -> int:
        """The number of heads, which ranks have to divide."""
        count: int = self.sizes["encoder_attention_heads" if self.inputs == "sound" else "num_attention_heads"]
        return count

    def lengths(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the numbers of tokens that are measured; an image has its own."""
        if self.inputs == "image":
            return [0]
        return sorted({min(count, _WORDS) if self.inputs == "sound" else count for count in tokens})

    def of(self, *, tiny: bool) -> dict[str, Any]:
        """Return the fields of the configuration, without the number of blocks."""
        return {"attn_implementation": "sdpa", "vocab_size": 128, **self.sizes, **(self.tiny if tiny else {})}

    def arguments(self, model: Any, tokens: int, device: str) -> dict[str, Tensor]:
        """Return random arguments of a call with one sequence, in the type of the model."""
        config = model.config

        def random(*shape: int) -> Tensor:
            return torch.randn(1, *shape, dtype=next(model.parameters()).dtype, device=device)

        if self.inputs == "image":
            return {"pixel_values": random(3, config.image_size, config.image_size)}
        if self.inputs == "sound":
            sound = random(config.num_mel_bins, 2 * config.max_source_positions)
            return {"input_features": sound, "decoder_inputs_embeds": random(tokens, config.d_model)}
        return {"inputs_embeds": random(tokens, config.hidden_size).requires_grad_()}


_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_DECODER = {"head_dim": 128, "num_key_value_heads": 8, "use_cache": False}
_TINY = {"hidden_size": 64, "head_dim": 8, "num_attention_heads": 16, "intermediate_size": 128}
_BERT = {
    "self.query": "out by heads",
    "self.key": "out by heads",
    "self.value": "out by heads",
    "attention.output.dense": "in by heads",
    "intermediate.dense": "out",
    "output.dense": "in",
}
_OTHERS = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "out by heads"), "fc1": "out", "fc2": "in"}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

#: Name of a model -> what is measured of it.
FAMILIES = {
    "llama-8b": Family(
        model="LlamaModel",
        sizes={"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 14336, **_DECODER},
        tiny=_TINY,
        divided=_DIVIDED,
        causal=True,
        dense=True,
    ),
    "llama-70b": Family(
        model="LlamaModel",
        sizes={"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672, **_DECODER},
        tiny={**_TINY, "num_attention_heads": 32},
        divided=_DIVIDED,
        causal=True,
        dense=True,
    ),
    "qwen3-30b-a3b": Family(
        model="Qwen3MoeModel",
        sizes={
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "intermediate_size": 6144,
            **_DECODER,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        tiny={**_TINY, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
        divided=(*_DIVIDED, "moe_intermediate_size"),
        causal=True,
    ),
    "bert-large": Family(
        model="BertModel",
        sizes={
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 4096,
            **_NO_DROPOUT,
        },
        tiny={"hidden_size": 64, "intermediate_size": 128},
        blocks=("encoder.layer",),
        linears=_BERT,
    ),
    "vit-huge": Family(
        model="ViTModel",
        sizes={
            "hidden_size": 1280,
            "num_attention_heads": 16,
            "intermediate_size": 5120,
            "image_size": 224,
            "patch_size": 14,
            **_NO_DROPOUT,
        },
        tiny={"hidden_size": 64, "intermediate_size": 128, "image_size": 56},
        inputs="image",
        linears={**_OTHERS, "o_proj": "in by heads"},
    ),
    "whisper-large": Family(
        model="WhisperModel",
        sizes={
            "d_model": 1280,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "dropout": 0.0,
            "use_cache": False,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "num_mel_bins": 128,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
        },
        tiny={
            "d_model": 80,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
        counts=("encoder_layers", "decoder_layers"),
        blocks=("encoder.layers", "decoder.layers"),
        inputs="sound",
        linears={**_OTHERS, "out_proj": "in by heads"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to one rank's share.

    Attributes:
        way: ``"ideal"``, ``"shardcore"``, ``"torch"`` or ``"transformers"``.
        options: of `shardcore.shard`, or of torch's plan for a block.
        compiled: each block is compiled.
    """

    way: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    def serves(self, family: Family) -> bool:
        """Tell whether it is measured for a model: torch's plans are those for Llama, transformers' for decoders."""
        return {"torch": family.dense, "transformers": family.causal}.get(self.way, True)


SYSTEMS = {
    "ideal": System(way="ideal"),
    "shardcore": System(way="shardcore"),
    "shardcore, norms as they are": System(way="shardcore", options={"enable_fused_normalization": False}),
    "shardcore, sequence": System(way="shardcore", options={"enable_sequence_parallelism": True}),
    "shardcore, overlap": System(
        way="shardcore", options={"enable_sequence_parallelism": True, "enable_sequence_overlap": True}
    ),
    "torch per linear": System(way="torch"),
    "torch per block": System(way="torch", options=PER_BLOCK),
    "transformers TP": System(way="transformers"),
    "ideal, compiled": System(way="ideal", compiled=True),
    "shardcore, compiled": System(way="shardcore", compiled=True),
}


def model_of(family: Family, system: System, count: int, device: str, *, tiny: bool, dtype: torch.dtype) -> Any:
    """Return a model of ``count`` blocks of which this rank has its share, or modules of that size."""
    torch.manual_seed(0)
    tp, fields = dist.get_world_size(), family.of(tiny=tiny)
    fields |= dict.fromkeys(family.counts, count)
    if system.way == "ideal":
        fields |= {name: math.ceil(fields[name] / tp) for name in family.divided}
    model_class: Any = getattr(transformers, family.model)
    without = {} if family.inputs == "sound" or family.causal else {"add_pooling_layer": False}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):  # whole models are drawn there, which a CPU would take long for
            model = model_class(model_class.config_class(**fields), **without).train()
            if system.way == "ideal" and family.linears:
                _narrow(model, family, tp)
    finally:
        torch.set_default_dtype(before)
    model = _shared_out(model, system, device).to(device)
    if system.compiled:
        for block in blocks_of(model, family):
            # Each length is a graph of its own. On a CPU, only whether there is one graph is of interest.
            block.compile(fullgraph=True, dynamic=False, backend="inductor" if device == "cuda" else "aot_eager")
    return model


def blocks_of(model: nn.Module, family: Family) -> list[Any]:
    """Return all blocks."""
    return [block for path in family.blocks for block in model.get_submodule(path).children()]


def _shared_out(model: Any, system: System, device: str) -> Any:
    tp = dist.get_world_size()
    if system.way == "shardcore":
        return shardcore.shard(model, tp=tp, **system.options)
    if system.way == "torch":
        parallelize_blocks(model.layers, init_device_mesh(device, (tp,), mesh_dim_names=("tp",)), system.options)
    elif system.way == "transformers":
        config = transformers.DistributedConfig(tp_size=tp)
        config, _, mesh = type(model).prepare_distribute_model(config)
        return type(model).maybe_distribute_model(model, config, mesh)
    return model


def _narrow(model: nn.Module, family: Family, tp: int) -> None:
    """Give the linears the sizes of rank 0, and what counts heads their number there."""
    heads, own = family.heads, math.ceil(family.heads / tp)
    for path, linear in [pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear)]:
        what = next((what for end, what in family.linears.items() if path.endswith(end)), None)
        if what is None:
            continue
        sizes = {"in": linear.in_features, "out": linear.out_features}
        side, _, by = what.partition(" ")
        sizes[side] = sizes[side] // heads * own if by else math.ceil(sizes[side] / tp)
        owner, _, name = path.rpartition(".")
        narrow = nn.Linear(sizes["in"], sizes["out"], bias=linear.bias is not None)
        setattr(model.get_submodule(owner), name, narrow)
    for module in model.modules():
        for name in ("num_heads", "num_attention_heads"):
            if name in vars(module):
                setattr(module, name, own)
