"""The configuration of the first Qwen, by the names of its config.json."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class QWenConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is Any
    """Sizes of a Qwen; the defaults are those of the 7B model."""

    model_type = "qwen"

    def __init__(
        self,
        vocab_size: int = 151936,
        hidden_size: int = 4096,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        emb_dropout_prob: float = 0.0,
        attn_dropout_prob: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        max_position_embeddings: int = 8192,
        use_cache: bool = True,
        kv_channels: int = 128,
        rotary_pct: float = 1.0,
        rotary_emb_base: float = 10000.0,
        use_dynamic_ntk: bool = True,
        use_logn_attn: bool = True,
        seq_length: int = 8192,
        intermediate_size: int = 22016,
        no_bias: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.emb_dropout_prob = emb_dropout_prob
        self.attn_dropout_prob = attn_dropout_prob
        self.layer_norm_epsilon = layer_norm_epsilon
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.kv_channels = kv_channels
        self.rotary_pct = rotary_pct
        self.rotary_emb_base = rotary_emb_base
        self.use_dynamic_ntk = use_dynamic_ntk
        self.use_logn_attn = use_logn_attn
        self.seq_length = seq_length
        self.intermediate_size = intermediate_size
        self.no_bias = no_bias
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
