"""Rewrite a checkpoint of the first Qwen for `transformers.Qwen2ForCausalLM`, without remote code.

    python -m shard_qwen.conversion Qwen-7B/ Qwen-7B-as-qwen2/

Names change, and the one linear for queries, keys and values is cut in three. What Qwen changes in evaluation on texts
longer than its ``seq_length`` (slower rotations, growing queries) is not done by Qwen2.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Qwen2Config

from shard_llama.conversion import require, rewrite
from shardcore.errors import ConfigError

#: Options of Qwen of which Qwen2 knows one value alone.
_ONLY = {"no_bias": True, "rotary_pct": 1.0, "tie_word_embeddings": False}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMES = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER = re.compile(r"transformer\.h\.(\d+)\.(.+)\.(weight|bias)")
_OF_LAYERS = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.up_proj",
    "mlp.w2": "mlp.gate_proj",
    "mlp.c_proj": "mlp.down_proj",
}
#: What Qwen2 computes from its configuration; old checkpoints have it.
_LEFT_OUT = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


def convert(source: str | Path, target: str | Path) -> None:
    """Write the checkpoint of a Qwen in the folder ``source`` to ``target`` as one of Qwen2, file by file.

    The tokenizer's files are not copied.

    Raises:
        ConfigError: ``source`` holds no weights, a tensor that Qwen has not, or a model with options that
            Qwen2 has not.
    """
    rewrite(source, target, configuration, renamed)


def configuration(config: Mapping[str, Any]) -> Any:
    """Return the configuration of Qwen2 for what a config.json of Qwen holds.

    Raises:
        ConfigError: it has an option that Qwen2 has not.
    """
    require(config, _ONLY, "Qwen", "Qwen2")
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=config.get("dtype") or config.get("torch_dtype"),
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"] // 2,
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_attention_heads"],
        max_position_embeddings=config["seq_length"],
        rms_norm_eps=config["layer_norm_epsilon"],
        rope_theta=float(config["rotary_emb_base"]),
        attention_dropout=0.0,  # which Qwen's kernel is not told of
        tie_word_embeddings=False,
        **{name: config.get(name) for name in _TOKENS},
    )


def renamed(state: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a ``Qwen2ForCausalLM`` for those of a Qwen.

    Raises:
        ConfigError: a tensor is none of Qwen's.
    """
    for name, tensor in state.items():
        layer = _LAYER.fullmatch(name)
        if name in _NAMES:
            yield _NAMES[name], tensor
        elif layer is not None and layer[2] == "attn.c_attn":
            for which, part in zip("qkv", tensor.chunk(3), strict=True):
                yield f"model.layers.{layer[1]}.self_attn.{which}_proj.{layer[3]}", part.clone()
        elif layer is not None and layer[2] in _OF_LAYERS:
            yield f"model.layers.{layer[1]}.{_OF_LAYERS[layer[2]]}.{layer[3]}", tensor
        elif not name.endswith(_LEFT_OUT):
            raise ConfigError(f"{name} is no tensor of Qwen; convert a checkpoint of its language model alone")


if __name__ == "__main__":
    convert(*sys.argv[1:])
