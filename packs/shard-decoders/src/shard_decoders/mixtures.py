"""How decoders with experts are sharded that are else built like Llama: what differs in each family."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from typing_extensions import override

from shard_decoders.policy import Olmo2Policy
from shard_llama.mixtures import MixturePolicy
from shard_llama.policy import LlamaPolicy
from shardcore.policy import Rule
from shardcore.styles import attribute, by_heads, local_groups, partial, region


class AfmoePolicy(MixturePolicy):
    """AFMoE (Trinity): a gate for all that the heads return, norms around attention and MLP."""

    norms: ClassVar[tuple[str, ...]] = (*LlamaPolicy.norms, "pre_mlp_layernorm", "post_mlp_layernorm")
    head_norms = ("q_norm", "k_norm")
    router: ClassVar[str] = "router"
    shared: ClassVar[str | None] = "shared_experts"

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
        norms = tuple(f"self_attn.{name}" for name in self.head_norms)
        columns = (q, "self_attn.gate_proj")
        return [
            region(enter="self_attn", col=columns, kv=(k, v), row="self_attn.o_proj", unit="head", partial=norms),
            attribute("self_attn.num_key_value_groups", local_groups),
        ]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        return [*super().feed_forward(), partial("mlp.expert_bias", optional=True)]


class Dots1Policy(MixturePolicy):
    """dots.llm1, EXAONE with experts, Hunyuan 3."""

    head_norms = ("q_norm", "k_norm")
    captured: ClassVar[int | None] = None
    shared: ClassVar[str | None] = "shared_experts"


class Ernie45MoePolicy(MixturePolicy):
    """ERNIE 4.5."""

    shared: ClassVar[str | None] = "shared_experts"


class FlexOlmoPolicy(MixturePolicy, Olmo2Policy):
    """FlexOlmo: OLMo 2 with experts."""


class Glm4MoePolicy(MixturePolicy):
    """GLM-4.5, 4.6 and 4.7; the larger ones normalize queries and keys."""

    captured: ClassVar[int | None] = None
    shared: ClassVar[str | None] = "shared_experts"

    @override
    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        self.head_norms = ("q_norm", "k_norm") if self.model.config.use_qk_norm else ()


class GptOssPolicy(MixturePolicy):
    """gpt-oss: every head has a sink, one number that its scores are normalized with."""

    context: ClassVar[str | tuple[str, ...]] = ()  # a rank of it would need the sinks of the heads that it gets
    router: ClassVar[str] = "router"

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        return [*super().attention(), by_heads("self_attn.sinks")]


class GraniteMoePolicy(MixturePolicy):
    """Granite 3, with experts."""

    mixture: ClassVar[str] = "block_sparse_moe"
    router: ClassVar[str] = "router"


class HunYuanMoEV1Policy(MixturePolicy):
    """Hunyuan A13B."""

    head_norms = ("query_layernorm", "key_layernorm")
    captured: ClassVar[int | None] = None
    shared: ClassVar[str | None] = "shared_mlp"


class Llama4Policy(MixturePolicy):
    """Llama 4: some layers have experts, some an MLP; those without positions scale queries by the place of a token."""

    context: ClassVar[str | tuple[str, ...]] = ()  # a place is counted from the first token that the attention is given
    rms: ClassVar[str | None] = "eps"
    mlp: ClassVar[str] = "feed_forward"
    mixture: ClassVar[str] = "feed_forward"
    router: ClassVar[str] = "router"
    captured: ClassVar[int | None] = 1
    shared: ClassVar[str | None] = "shared_expert"


class MellumPolicy(MixturePolicy):
    """Mellum 2."""

    head_norms = ("q_norm", "k_norm")


class MiniMaxM2Policy(MixturePolicy, Olmo2Policy):
    """MiniMax M2: normalizes queries and keys over the features of all heads, as OLMo 2 does."""

    norms: ClassVar[tuple[str, ...]] = LlamaPolicy.norms


class OlmoePolicy(MixturePolicy, Olmo2Policy):
    """OLMoE."""

    norms: ClassVar[tuple[str, ...]] = LlamaPolicy.norms


class SolarOpenPolicy(MixturePolicy):
    """Solar Open."""

    captured: ClassVar[int | None] = None
    shared: ClassVar[str | None] = "shared_experts"
