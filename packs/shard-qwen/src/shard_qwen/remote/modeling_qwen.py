"""The first Qwen for the tests of this pack: the architecture, names and layouts of its remote code."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_qwen import QWenConfig

#: Keys and values of earlier tokens, (B, S, heads, D) each.
Cache = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Divides by the root mean square of the features."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, (1, S, 1, D) each; ``ntk_alpha`` slows them for texts that are too long."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = base

    def forward(self, max_seq_len: int, ntk_alpha: float = 1.0, like: Any = None) -> list[Tensor]:
        base = self.base * ntk_alpha ** (self.dim / (self.dim - 2))
        count: dict[str, Any] = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        speeds = base ** -(torch.arange(0, self.dim, 2, **count) / self.dim)
        angles = torch.outer(torch.arange(max_seq_len, **count), speeds)
        both = torch.cat([angles, angles], -1)[None, :, None]
        return [both.cos(), both.sin()]


def apply_rotary_pos_emb(x: Tensor, rotary: Any) -> Tensor:
    """Rotate the first dims of heads (B, S, heads, D), each in the first half of them with one in the second."""
    cos, sin = rotary
    turned, rest = x[..., : cos.size(-1)].to(cos.dtype), x[..., cos.size(-1) :]
    first, second = turned.chunk(2, -1)
    return torch.cat([(turned * cos + torch.cat([-second, first], -1) * sin).type_as(x), rest], -1)


class QWenAttention(nn.Module):
    """Attention with one linear for queries, keys and values."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        self.seq_length = config.seq_length
        self.hidden_size = config.hidden_size
        self.split_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.projection_size = config.kv_channels * config.num_attention_heads
        self.c_attn = nn.Linear(config.hidden_size, 3 * self.projection_size)
        self.c_proj = nn.Linear(config.hidden_size, self.projection_size, bias=not config.no_bias)
        self.use_dynamic_ntk = config.use_dynamic_ntk
        self.use_logn_attn = config.use_logn_attn
        self.attn_dropout = nn.Dropout(config.attn_dropout_prob)  # which torch's kernel is not told of

    def forward(
        self,
        hidden_states: Tensor,
        rotary_pos_emb_list: Any = None,
        layer_past: Cache | None = None,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        use_cache: bool | None = False,
    ) -> tuple[Any, ...]:
        if output_attentions:
            raise ValueError("torch's kernel returns no attention weights")
        parts = self.c_attn(hidden_states).split(self.split_size, 2)
        query, key, value = (part.view(*part.shape[:-1], self.num_heads, self.head_dim) for part in parts)
        if rotary_pos_emb_list is not None:
            query, key = (self._rotated(x, rotary_pos_emb_list) for x in (query, key))
        if layer_past is not None:
            key, value = (torch.cat([before, x], 1) for before, x in zip(layer_past, (key, value), strict=True))
        present = (key, value) if use_cache else None
        length, size = query.size(1), key.size(1)
        if size > self.seq_length and self.use_logn_attn and not self.training:
            places = torch.arange(size - length, size, device=query.device).clamp(min=self.seq_length)
            logs = places.to(torch.float64).log() / math.log(self.seq_length)
            query = query * logs[None, :, None, None].type_as(query)
        mask = attention_mask
        if length == size:
            seen = torch.ones(size, size, dtype=torch.bool, device=query.device).tril().view(1, 1, size, size)
            least = torch.finfo(query.dtype).min
            mask = seen if mask is None else mask.expand(-1, -1, size, -1).masked_fill(~seen, least)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        return self.c_proj(out.reshape(*out.shape[:2], self.num_heads * self.head_dim)), present

    def _rotated(self, x: Tensor, rotary: Any) -> Tensor:
        own = [[part[:, -x.size(1) :] for part in parts] for parts in rotary]
        if len(own) == 1:
            return apply_rotary_pos_emb(x, own[0])
        return torch.cat([apply_rotary_pos_emb(x[i : i + 1], parts) for i, parts in enumerate(own)])


class QWenMLP(nn.Module):
    """A gated MLP."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        half, bias = config.intermediate_size // 2, not config.no_bias
        self.w1 = nn.Linear(config.hidden_size, half, bias=bias)
        self.w2 = nn.Linear(config.hidden_size, half, bias=bias)
        self.c_proj = nn.Linear(half, config.hidden_size, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.w1(hidden_states) * F.silu(self.w2(hidden_states)))
        return out


class QWenBlock(GradientCheckpointingLayer):  # type: ignore[misc]  # transformers is Any
    """Attention and MLP, each behind a norm."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attn = QWenAttention(config)
        self.ln_2 = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = QWenMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        rotary_pos_emb_list: Any = None,
        layer_past: Cache | None = None,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
    ) -> tuple[Any, ...]:
        out, present = self.attn(
            self.ln_1(hidden_states),
            rotary_pos_emb_list,
            layer_past=layer_past,
            attention_mask=attention_mask,
            head_mask=head_mask,
            use_cache=use_cache,
            output_attentions=output_attentions,
        )
        hidden_states = out + hidden_states
        hidden_states = hidden_states + self.mlp(self.ln_2(hidden_states))
        return (hidden_states, present) if use_cache else (hidden_states,)


class QWenPreTrainedModel(PreTrainedModel):  # type: ignore[misc]  # transformers is Any
    """What both classes share."""

    config_class = QWenConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ("QWenBlock",)

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as torch makes them."""


class QWenModel(QWenPreTrainedModel):
    """The decoder."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        self.seq_length = config.seq_length
        self.use_dynamic_ntk = config.use_dynamic_ntk
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.drop = nn.Dropout(config.emb_dropout_prob)
        self.rotary_emb = RotaryEmbedding(int(config.kv_channels * config.rotary_pct), base=config.rotary_emb_base)
        self.h = nn.ModuleList(QWenBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.wte = value

    def get_ntk_alpha(self, true_seq_len: int) -> int:
        return max((1 << max(math.ceil(math.log2(true_seq_len / self.seq_length) + 1), 0)) - 1, 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        use_cache = config.use_cache if use_cache is None else use_cache
        hidden_states = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        past = [None] * len(self.h) if past_key_values is None else past_key_values
        length = hidden_states.size(1) + (0 if past[0] is None else past[0][0].size(1))
        lengths = [length]
        if attention_mask is not None:
            if length > self.seq_length:
                lengths = attention_mask.sum(-1).tolist()
            mask = attention_mask.view(len(hidden_states), 1, 1, -1).to(self.dtype)
            attention_mask = (1.0 - mask) * torch.finfo(self.dtype).min
        slows = self.use_dynamic_ntk and not self.training
        alphas = [self.get_ntk_alpha(each) for each in lengths] if slows else [1]
        rotary = [self.rotary_emb(length, ntk_alpha=alpha, like=hidden_states) for alpha in alphas]
        hidden_states = self.drop(hidden_states)
        shape = hidden_states.shape
        presents, states = [], []
        for block, layer_past in zip(self.h, past, strict=True):
            states.append(hidden_states)
            hidden_states, *present = block(
                hidden_states,
                layer_past=layer_past,
                rotary_pos_emb_list=rotary,
                attention_mask=attention_mask,
                head_mask=None,
                use_cache=use_cache,
                output_attentions=output_attentions,
            )
            presents += present
        hidden_states = self.ln_f(hidden_states).view(shape)
        out = BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=tuple(presents) if use_cache else None,
            hidden_states=(*states, hidden_states) if output_hidden_states else None,
        )
        return out if (config.return_dict if return_dict is None else return_dict) else out.to_tuple()


class QWenLMHeadModel(QWenPreTrainedModel):
    """The decoder with scores of words."""

    def __init__(self, config: QWenConfig) -> None:
        super().__init__(config)
        self.transformer = QWenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        out = self.transformer(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            head_mask=head_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            scores, shifted = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = nn.CrossEntropyLoss()(scores.view(-1, scores.size(-1)), shifted.view(-1))
        made = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return made if (self.config.return_dict if return_dict is None else return_dict) else made.to_tuple()
