"""Rewrite a checkpoint of ChatGLM2 for `transformers.GlmForCausalLM`, which computes the same without remote code.

    python -m shard_glm.conversion chatglm2-6b/ chatglm2-6b-glm/

Names change, and the one linear for queries, keys and values is cut in three. ChatGLM3 and CodeGeeX2 are built alike.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GlmConfig

from shard_llama.conversion import require, rewrite
from shardcore.errors import ConfigError

#: Options of ChatGLM2 of which GLM knows one value alone.
_ONLY = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "quantization_bit": 0,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NAMES = {
    "transformer.embedding.word_embeddings.": "model.embed_tokens.",
    "transformer.encoder.final_layernorm.": "model.norm.",
    "transformer.output_layer.": "lm_head.",
}
_LAYER = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OF_LAYERS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
#: What GLM computes from its configuration.
_LEFT_OUT = "transformer.rotary_pos_emb.inv_freq"


def convert(source: str | Path, target: str | Path) -> None:
    """Write the checkpoint of a ChatGLM2 in the folder ``source`` to ``target`` as one of GLM, file by file.

    The tokenizer's files are not copied.

    Raises:
        ConfigError: ``source`` holds no weights, a tensor that ChatGLM2 has not, or a model with options that
            GLM has not.
    """
    rewrite(source, target, configuration, renamed)


def configuration(config: Mapping[str, Any]) -> Any:
    """Return the configuration of GLM for what a config.json of ChatGLM2 holds.

    Raises:
        ConfigError: it has an option that GLM has not.
    """
    require(config, _ONLY, "ChatGLM2", "GLM")
    return GlmConfig(
        architectures=["GlmForCausalLM"],
        dtype=config.get("dtype") or config.get("torch_dtype"),
        vocab_size=config["padded_vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["ffn_hidden_size"],
        num_hidden_layers=config["num_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["multi_query_group_num"],
        head_dim=config["kv_channels"],
        max_position_embeddings=config["seq_length"],
        rms_norm_eps=config["layernorm_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0 * config.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
        attention_bias=bool(config.get("add_qkv_bias")),
        attention_dropout=0.0,  # which ChatGLM2's kernel is not told of
        tie_word_embeddings=False,
        **{name: config.get(name) for name in _TOKENS},
    )


def renamed(state: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a ``GlmForCausalLM`` of this configuration for those of a ChatGLM2.

    Raises:
        ConfigError: a tensor is none of ChatGLM2's.
    """
    heads, groups = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    for name, tensor in state.items():
        layer = _LAYER.fullmatch(name)
        start = next((start for start in _NAMES if name.startswith(start)), None)
        if start is not None:
            yield _NAMES[start] + name.removeprefix(start), tensor
        elif layer is not None and layer[2] == "self_attention.query_key_value":
            for which, part in zip("qkv", tensor.split([heads, groups, groups]), strict=True):
                yield f"model.layers.{layer[1]}.self_attn.{which}_proj.{layer[3]}", part.clone()
        elif layer is not None and layer[2] in _OF_LAYERS:
            yield f"model.layers.{layer[1]}.{_OF_LAYERS[layer[2]]}.{layer[3]}", tensor
        elif name != _LEFT_OUT:
            raise ConfigError(f"{name} is no tensor of ChatGLM2; convert a checkpoint of its language model alone")


if __name__ == "__main__":
    convert(*sys.argv[1:])
