"""The configuration of ChatGLM2, by the names of its config.json."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is Any
    """Sizes of a ChatGLM2; the defaults are those of the 6B model."""

    model_type = "chatglm"
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "num_layers", "vocab_size": "padded_vocab_size"}

    def __init__(
        self,
        num_layers: int = 28,
        padded_vocab_size: int = 65024,
        hidden_size: int = 4096,
        ffn_hidden_size: int = 13696,
        kv_channels: int = 128,
        num_attention_heads: int = 32,
        seq_length: int = 2048,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        rmsnorm: bool = True,
        apply_residual_connection_post_layernorm: bool = False,
        post_layer_norm: bool = True,
        add_bias_linear: bool = False,
        add_qkv_bias: bool = True,
        multi_query_attention: bool = True,
        multi_query_group_num: int = 2,
        fp32_residual_connection: bool = False,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.num_layers = num_layers
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.kv_channels = kv_channels
        self.num_attention_heads = num_attention_heads
        self.seq_length = seq_length
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.layernorm_epsilon = layernorm_epsilon
        self.rmsnorm = rmsnorm
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.post_layer_norm = post_layer_norm
        self.add_bias_linear = add_bias_linear
        self.add_qkv_bias = add_qkv_bias
        self.multi_query_attention = multi_query_attention
        self.multi_query_group_num = multi_query_group_num
        self.fp32_residual_connection = fp32_residual_connection
        self.use_cache = use_cache
        super().__init__(**kwargs)
