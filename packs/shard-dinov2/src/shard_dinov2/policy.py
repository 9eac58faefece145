"""How DINOv2 is sharded, with registers and without, and what each head adds."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.dinov2 import modeling_dinov2

from shard_dinov2 import early
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import norm, outputs, region, replicate, sequence, shared_rng
from shardcore_transformers import PretrainedPolicy

#: In early releases of transformers blocks have other names.
IS_EARLY = hasattr(modeling_dinov2, "Dinov2SelfAttention")

_ATTENTION: list[Rule] = [
    region(
        enter="attention",
        col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        row="attention.o_proj",
        unit="head",
    )
]
_GATED = region(enter="mlp", col=("mlp.gate_proj", "mlp.up_proj"), row="mlp.down_proj", optional=True)
_BLOCK: list[Rule] = [
    norm("norm1", "norm2"),
    *(early.ATTENTION if IS_EARLY else _ATTENTION),
    region(enter="mlp", col="mlp.fc1", row="mlp.fc2", optional=True),
    early.GATED if IS_EARLY else _GATED,  # a block has one kind of MLP or the other
    replicate("layer_scale1", "layer_scale2"),
    shared_rng("drop_path"),
]
_STAGES = Stages(first="embeddings", blocks="encoder.layer", last="layernorm")
_REGISTERS = "dinov2_with_registers"


class Dinov2ModelPolicy(PretrainedPolicy):
    """The encoder without a head; any number of ranks share its heads."""

    family: ClassVar[str] = "Dinov2"
    checks = (Heads("num_attention_heads", uneven=True),)
    stages = _STAGES
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head."""
        return {
            f"{self.family}Embeddings": [replicate("")],
            f"{self.family}Layer": _BLOCK,
            f"{self.family}Model": [
                norm("layernorm"),
                sequence(scatter="encoder.layer[0]", gather="layernorm", attention="attention"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            **self.rules,
        }


class Dinov2ForImageClassificationPolicy(Dinov2ModelPolicy):
    """The encoder with a label for each image."""

    stages = _STAGES.under("dinov2", then="classifier")
    rules: ClassVar[ModulePolicy] = {"Dinov2ForImageClassification": [replicate("classifier")]}


class Dinov2BackbonePolicy(Dinov2ModelPolicy):
    """The encoder as a backbone, which reads the states of every block by itself: its tokens stay whole."""

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, and of the norm of all features."""
        inner = {name: rules for name, rules in super().module_policy().items() if name != f"{self.family}Model"}
        return {**inner, f"{self.family}Backbone": [norm("layernorm"), outputs(attentions="heads")]}


class Dinov2WithRegistersModelPolicy(Dinov2ModelPolicy):
    """The encoder with registers beside the patches."""

    family: ClassVar[str] = "Dinov2WithRegisters"


class Dinov2WithRegistersForImageClassificationPolicy(Dinov2WithRegistersModelPolicy):
    """The encoder with registers and a label for each image."""

    stages = _STAGES.under(_REGISTERS, then="classifier")
    rules: ClassVar[ModulePolicy] = {"Dinov2WithRegistersForImageClassification": [replicate("classifier")]}


class Dinov2WithRegistersBackbonePolicy(Dinov2BackbonePolicy):
    """The encoder with registers as a backbone."""

    family: ClassVar[str] = "Dinov2WithRegisters"
