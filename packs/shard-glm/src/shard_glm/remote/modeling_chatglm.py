"""ChatGLM2 for the tests of this pack: the architecture, module and weight names, and layouts of its remote code.

Activations are (S, B, H): tokens first. Half of the dims of each head are rotated, in neighbouring pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_chatglm import ChatGLMConfig

#: Keys and values of earlier tokens, (S, B, groups, D) each.
Cache = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Divides by the root mean square of the features."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(hidden_states.dtype)


def _norm(config: ChatGLMConfig) -> nn.Module:
    return (RMSNorm if config.rmsnorm else nn.LayerNorm)(config.hidden_size, eps=config.layernorm_epsilon)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, (S, D / 4, 2)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, dim, 2) / dim))

    def forward(self, max_seq_len: int) -> Tensor:
        at: Any = self.inv_freq
        powers = torch.arange(0, self.dim, 2, dtype=at.dtype, device=at.device) / self.dim
        angles = torch.outer(torch.arange(max_seq_len, dtype=at.dtype, device=at.device), 10000.0**-powers)
        return torch.stack([angles.cos(), angles.sin()], -1)


def apply_rotary_pos_emb(x: Tensor, rope_cache: Tensor) -> Tensor:
    """Rotate the first dims of heads (S, B, heads, D) by (S, B or 1, D / 4, 2)."""
    rotated = 2 * rope_cache.size(-2)
    pairs = x[..., :rotated].unflatten(-1, (-1, 2))
    cos, sin = rope_cache[: x.size(0)].unsqueeze(2).unbind(-1)
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, x[..., rotated:]], -1)


class CoreAttention(nn.Module):
    """Attention of heads (S, B, heads, D), to (S, B, heads * D); True in a mask hides a key."""

    def __init__(self, config: ChatGLMConfig, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.hidden_size_per_partition = config.kv_channels * config.num_attention_heads
        self.hidden_size_per_attention_head = config.kv_channels
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.attention_dropout = nn.Dropout(config.attention_dropout)  # which torch's kernel is not told of

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        if attention_mask is None and q.size(2) == k.size(2):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, None if attention_mask is None else ~attention_mask)
        out = out.permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], self.hidden_size_per_partition)


class SelfAttention(nn.Module):
    """Attention in which groups of heads share keys and values, with one linear for all three."""

    def __init__(self, config: ChatGLMConfig, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.hidden_size_per_attention_head = config.kv_channels
        self.num_attention_heads_per_partition = config.num_attention_heads
        self.multi_query_attention = config.multi_query_attention
        self.qkv_hidden_size = 3 * self.projection_size
        if self.multi_query_attention:
            self.num_multi_query_groups_per_partition = config.multi_query_group_num
            self.qkv_hidden_size = self.projection_size + 2 * config.kv_channels * config.multi_query_group_num
        bias = config.add_bias_linear or config.add_qkv_bias
        self.query_key_value = nn.Linear(config.hidden_size, self.qkv_hidden_size, bias=bias)
        self.core_attention = CoreAttention(config, layer_number)
        self.dense = nn.Linear(self.projection_size, config.hidden_size, bias=config.add_bias_linear)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        kv_cache: Cache | None = None,
        use_cache: bool = True,
    ) -> tuple[Tensor, Cache | None]:
        mixed = self.query_key_value(hidden_states)
        heads, size = self.num_attention_heads_per_partition, self.hidden_size_per_attention_head
        if self.multi_query_attention:
            groups = self.num_multi_query_groups_per_partition
            parts = mixed.split([heads * size, groups * size, groups * size], -1)
            query, key, value = (part.view(*part.shape[:-1], -1, size) for part in parts)
        else:
            groups = heads
            query, key, value = mixed.view(*mixed.shape[:-1], heads, 3 * size).chunk(3, -1)
        if rotary_pos_emb is not None:
            query, key = (apply_rotary_pos_emb(x, rotary_pos_emb) for x in (query, key))
        if use_cache and kv_cache is not None:
            key, value = (torch.cat([before, x]) for before, x in zip(kv_cache, (key, value), strict=True))
        present = (key, value) if use_cache else None
        key, value = (x.repeat_interleave(heads // groups, 2) for x in (key, value))
        return self.dense(self.core_attention(query, key, value, attention_mask)), present


class MLP(nn.Module):
    """A gated MLP, with one linear for both halves."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        bias = config.add_bias_linear
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=bias)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(hidden_states).chunk(2, -1)
        out: Tensor = self.dense_4h_to_h(F.silu(gate) * up)
        return out


class GLMBlock(GradientCheckpointingLayer):  # type: ignore[misc]  # transformers is Any
    """Attention and MLP, each behind a norm, on (S, B, H)."""

    def __init__(self, config: ChatGLMConfig, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.apply_residual_connection_post_layernorm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = _norm(config)
        self.self_attention = SelfAttention(config, layer_number)
        self.hidden_dropout = config.hidden_dropout
        self.post_attention_layernorm = _norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        kv_cache: Cache | None = None,
        use_cache: bool = True,
    ) -> tuple[Tensor, Cache | None]:
        normed = self.input_layernorm(hidden_states)
        out, kv_cache = self.self_attention(normed, attention_mask, rotary_pos_emb, kv_cache, use_cache)
        hidden_states = self._added(out, hidden_states, normed)
        normed = self.post_attention_layernorm(hidden_states)
        return self._added(self.mlp(normed), hidden_states, normed), kv_cache

    def _added(self, out: Tensor, hidden_states: Tensor, normed: Tensor) -> Tensor:
        out = F.dropout(out, self.hidden_dropout, self.training)
        return out + (normed if self.apply_residual_connection_post_layernorm else hidden_states)


class GLMTransformer(nn.Module):
    """The blocks, and a norm behind them."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.post_layer_norm = config.post_layer_norm
        self.layers = nn.ModuleList(GLMBlock(config, i + 1) for i in range(config.num_layers))
        if self.post_layer_norm:
            self.final_layernorm = _norm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None,
        kv_caches: Any = None,
        use_cache: bool | None = True,
        output_hidden_states: bool | None = False,
    ) -> tuple[Tensor, Any, Any, None]:
        kv_caches = kv_caches or [None] * self.num_layers
        presents, states = [], []
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            states.append(hidden_states)
            hidden_states, present = layer(hidden_states, attention_mask, rotary_pos_emb, kv_cache, bool(use_cache))
            presents.append(present)
        states.append(hidden_states)
        if self.post_layer_norm:
            hidden_states = self.final_layernorm(hidden_states)
        return (
            hidden_states,
            tuple(presents) if use_cache else None,
            tuple(states) if output_hidden_states else None,
            None,
        )


class ChatGLMPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # transformers is Any
    """What both classes share."""

    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ("GLMBlock",)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as torch makes them."""

    def get_masks(self, input_ids: Tensor, past_key_values: Any, padding_mask: Tensor | None = None) -> Tensor:
        """Return (B, 1, S, past + S): True where a token does not see another one."""
        rows, length = input_ids.shape
        past = past_key_values[0][0].shape[0] if past_key_values else 0
        seen = torch.ones(length, past + length, device=input_ids.device).tril(past).repeat(rows, 1, 1)
        if padding_mask is not None:
            seen = seen * padding_mask.unsqueeze(1)
            if not past:
                seen = seen - padding_mask.unsqueeze(-1) + 1  # padding sees all
        return (seen < 0.5).unsqueeze(1)


class Embedding(nn.Module):
    """Embeds words, and puts tokens first: (B, S) to (S, B, H)."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.fp32_residual_connection = config.fp32_residual_connection

    def forward(self, input_ids: Tensor) -> Tensor:
        embeddings: Tensor = self.word_embeddings(input_ids).transpose(0, 1).contiguous()
        return embeddings.float() if self.fp32_residual_connection else embeddings


class ChatGLMModel(ChatGLMPreTrainedModel):
    """The decoder; it has the linear that scores words too, and leaves it to others."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.seq_length = config.seq_length
        self.rotary_pos_emb = RotaryEmbedding(config.kv_channels // 2)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        full_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        use_cache = config.use_cache if use_cache is None else use_cache
        length = input_ids.shape[1]
        embeds = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        padded = attention_mask is not None and not attention_mask.all()
        if full_attention_mask is None and (padded or (past_key_values and length != 1)):
            full_attention_mask = self.get_masks(input_ids, past_key_values, attention_mask)
        table = self.rotary_pos_emb(self.seq_length)
        rotary = table[None, :length] if position_ids is None else table[position_ids]
        rotary = rotary.transpose(0, 1).contiguous()
        hidden_states, presents, states, _ = self.encoder(
            embeds,
            full_attention_mask,
            rotary_pos_emb=rotary,
            kv_caches=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        out = BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=presents, hidden_states=states)
        return out if (config.return_dict if return_dict is None else return_dict) else out.to_tuple()


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel):
    """The decoder with scores of words."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        return_last_logit: bool | None = False,
    ) -> Any:
        out = self.transformer(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden_states = out.last_hidden_state
        if return_last_logit:
            hidden_states = hidden_states[-1:]
        logits = self.transformer.output_layer(hidden_states).transpose(0, 1).contiguous()
        loss = None
        if labels is not None:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scores, shifted = wide[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss(ignore_index=-100)(scores.view(-1, scores.size(-1)), shifted.view(-1))
            loss = loss.to(hidden_states.dtype)
        made = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return made if (self.config.return_dict if return_dict is None else return_dict) else made.to_tuple()
