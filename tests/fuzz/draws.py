"""What one draw is: a model, a configuration, a batch, a call; here those of the kind `plain`, each of one number."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["FAMILIES", "MODELS", "Dice", "Draw", "draw_plain"]

Value = TypeVar("Value")

#: Family -> its classes; a class is drawn as often as any other of its family.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama": (
        "LlamaModel",
        "LlamaForCausalLM",
        "LlamaForSequenceClassification",
        "LlamaForTokenClassification",
        "LlamaForQuestionAnswering",
    ),
    "bert": (
        "BertModel",
        "BertForPreTraining",
        "BertLMHeadModel",
        "BertForMaskedLM",
        "BertForNextSentencePrediction",
        "BertForSequenceClassification",
        "BertForMultipleChoice",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
    ),
    "vit": ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"),
    "whisper": (
        "WhisperModel",
        "WhisperForConditionalGeneration",
        "WhisperForAudioClassification",
        "WhisperForCausalLM",
    ),
    "timm": ("VisionTransformer", "VisionTransformerDistilled"),
}

#: Classes with a head over the vocabulary, whose logits can stay split.
_SPLITS_LOGITS = ("LlamaForCausalLM", "BertForMaskedLM", "BertForPreTraining", "WhisperForConditionalGeneration")
_GENERATES = ("LlamaForCausalLM", "BertLMHeadModel", "WhisperForConditionalGeneration")
#: Ways to call a model, and how often each is drawn.
_CALLS = {
    "one": 4,  # one backward
    "accumulate": 3,  # three backwards on other batches
    "retain": 1,  # two backwards through one graph
    "two_forwards": 2,  # two calls of other lengths, then one backward
    "no_grad_between": 1,  # another call without gradients between forward and backward
    "autograd_grad": 1,
    "steps": 3,  # clipping and AdamW
    "captured": 1,  # a loss of all that is captured
    "evaluate": 1,  # without gradients
    "generate": 1,
    "part": 2,  # a module below the root, called by itself
}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One configuration of the search.

    Attributes:
        number: what all the rest follows from.
        kind: what is tried; `kinds.KINDS` has them.
        family: the key in `FAMILIES`, or in `kinds.MIXTURES`.
        cls: the model's class.
        mesh: sizes of the configuration, such as ``{"tensor_parallel_size": 2}``.
        fields: other fields of the configuration.
        model: settings of the model.
        batch: settings of its batches.
        call: how the model is called.
        checkpointing: ``""``, ``"reentrant"`` or ``"non-reentrant"``.
        frozen: the part of the parameters that is frozen.
        how: settings that only this kind has.
        odd: arguments that one rank alone passes, and that change nothing.
        must: why it has to be refused.
        may: what messages say if it is refused, where that depends on the values of the batch.
        dtype: in which it is computed.
    """

    number: int
    kind: str = "plain"
    family: str
    cls: str
    mesh: Mapping[str, int]
    fields: Mapping[str, Any]
    model: Mapping[str, Any]
    batch: Mapping[str, Any]
    call: str
    checkpointing: str = ""
    frozen: float = 0.0
    ranks: int = 2
    how: Mapping[str, Any] = field(default_factory=dict)
    odd: Mapping[str, Any] = field(default_factory=dict)
    must: str = ""
    may: tuple[str, ...] = ()
    dtype: str = "float64"

    @property
    def tp(self) -> int:
        """The tensor-parallel size."""
        return self.mesh["tensor_parallel_size"]

    @property
    def pp(self) -> int:
        """The number of ranks of a pipeline."""
        return self.mesh.get("pipeline_parallel_size", 1)

    @property
    def replicas(self) -> int:
        """The data-parallel size."""
        return self.ranks // (self.tp * self.pp * self.mesh.get("context_parallel_size", 1))

    def refused(self) -> str:
        """Say why ``shard`` has to refuse it; empty if it has to work."""
        for query, kv in self.model.get("heads_of", ()):
            if query % self.tp:
                return "query heads"
            if kv % self.tp and self.tp % kv:
                return "key/value heads"
        return self.must

    def __str__(self) -> str:
        said = {
            "mesh": dict(self.mesh),
            "fields": dict(self.fields),
            "model": {k: v for k, v in self.model.items() if k != "heads_of"},
            "batch": dict(self.batch),
            "call": self.call,
            "checkpointing": self.checkpointing,
            "frozen": self.frozen,
            "how": dict(self.how),
            "odd": dict(self.odd),
            "dtype": self.dtype,
        }
        return f"draw {self.number}: {self.kind} {self.cls} " + ", ".join(
            f"{name}={value}" for name, value in said.items() if value
        )


class Dice:
    """A source of choices that are the same in every process."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def of(self, *values: Value) -> Value:
        """Return one of ``values``."""
        return values[self._random.randrange(len(values))]

    def often(self, share: float) -> bool:
        """Return True in this share of draws."""
        return self._random.random() < share

    def weighted(self, weights: Mapping[str, int]) -> str:
        """Return a key, as often as its weight says."""
        return self._random.choices(list(weights), list(weights.values()))[0]


def draw_plain(number: int) -> Draw:
    """Return a draw of tensor parallelism and replicas: the same in every process, whatever is installed."""
    dice = Dice(number)
    family = dice.of(*FAMILIES)
    cls = dice.of(*FAMILIES[family])
    mesh, ranks = _mesh(dice)
    tp = mesh["tensor_parallel_size"]
    if family in ("llama", "bert") and ranks == 2 and dice.often(0.4):
        mesh["context_parallel_size"], ranks = 2, 4
    model = MODELS[family](dice, cls, tp)
    calls = {call: weight for call, weight in _CALLS.items() if _fits(call, family, cls, ranks // tp)}
    fields: dict[str, Any] = {}
    call = dice.weighted(calls)
    if dice.often(0.5):
        fields["enable_sequence_parallelism"] = True
        if dice.often(0.4):
            fields["sequence_keep_gathered"] = False
    if cls in _SPLITS_LOGITS and dice.often(0.5):
        fields["parallel_output"] = True
        if dice.often(0.5):
            fields["loss_chunk_size"] = dice.of(1, 3, 8)
    if dice.often(0.5):
        fields["partial_gradients"] = dice.of("in_backward", "deferred")
    if dice.often(0.2):
        fields["enable_fused_normalization"] = "auto"
    checkpointing = ""
    if call in ("evaluate", "generate") and dice.often(0.3):
        fields["inference_only"] = True
        fields.pop("parallel_output", None)
        fields.pop("loss_chunk_size", None)
    elif family != "timm" and dice.often(0.3):
        checkpointing = dice.of("non-reentrant", "reentrant")
    return Draw(
        number=number,
        family=family,
        cls=cls,
        mesh=mesh,
        ranks=ranks,
        fields=fields,
        model=model,
        batch=_batch(dice, family),
        call=call,
        checkpointing=checkpointing,
        frozen=dice.of(0.3, 0.7) if dice.often(0.3) and call != "steps" else 0.0,
        may=("context parallelism", "context_parallel") if "context_parallel_size" in mesh else (),
    )


def _mesh(dice: Dice) -> tuple[dict[str, int], int]:
    tp, shards, copies = dice.of(
        (2, 1, 1), (2, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 1)
    )
    mesh = {"tensor_parallel_size": tp}
    if shards > 1:
        mesh["dp_shard_size"] = shards
    if copies > 1:
        mesh["dp_replicate_size"] = copies
    return mesh, tp * shards * copies


def _fits(call: str, family: str, cls: str, replicas: int) -> bool:
    if call == "generate":
        return cls in _GENERATES
    if call in ("captured", "part"):
        return family != "timm"
    # FSDP2 reduces gradients in hooks on parameters, and frees what it gathered after each backward.
    return replicas == 1 or call not in ("retain", "autograd_grad")


def _heads(dice: Dice, tp: int) -> int:
    """Return a number of heads that the ranks divide, but for a few draws."""
    return dice.of(1, 2, 3, 5) if dice.often(0.05) else tp * dice.of(1, 2, 2, 3)


def _llama(dice: Dice, cls: str, tp: int) -> dict[str, Any]:
    heads = _heads(dice, tp)
    kv = dice.of(*(n for n in range(1, heads + 1) if heads % n == 0))
    return {
        "vocab_size": dice.of(11, 32, 97),
        "hidden_size": heads * dice.of(4, 6, 8),
        "intermediate_size": dice.of(7, 16, 37),
        "num_hidden_layers": dice.of(1, 2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "attention_bias": dice.often(0.4),
        "mlp_bias": dice.often(0.4),
        "tie_word_embeddings": dice.often(0.4),
        "attn_implementation": dice.of("sdpa", "eager"),
        "num_labels": dice.of(2, 3, 5),
        "heads_of": ((heads, kv),),
    }


def _bert(dice: Dice, cls: str, tp: int) -> dict[str, Any]:
    heads = _heads(dice, tp)
    decodes = cls == "BertLMHeadModel"
    return {
        "vocab_size": dice.of(11, 32, 97),
        "hidden_size": heads * dice.of(4, 6, 8),
        "intermediate_size": dice.of(7, 16, 37),
        "num_hidden_layers": dice.of(1, 2, 3),
        "num_attention_heads": heads,
        "is_decoder": decodes,
        "add_cross_attention": decodes and dice.often(0.4),
        "tie_word_embeddings": dice.often(0.7),
        "attn_implementation": dice.of("sdpa", "eager"),
        "num_labels": dice.of(2, 3, 5),
        "heads_of": ((heads, heads),),
    }


def _vit(dice: Dice, cls: str, tp: int) -> dict[str, Any]:
    heads = _heads(dice, tp)
    return {
        "image_size": dice.of(8, 12, 16),
        "hidden_size": heads * dice.of(4, 8),
        "intermediate_size": dice.of(7, 16, 37),
        "num_hidden_layers": dice.of(1, 2, 3),
        "num_attention_heads": heads,
        "qkv_bias": dice.often(0.7),
        "attn_implementation": dice.of("sdpa", "eager"),
        "num_labels": dice.of(2, 3, 5),
        "heads_of": ((heads, heads),),
    }


def _whisper(dice: Dice, cls: str, tp: int) -> dict[str, Any]:
    encoder, decoder = _heads(dice, tp), _heads(dice, tp)
    width = encoder * decoder * dice.of(2, 4) if encoder != decoder else encoder * dice.of(4, 8)
    # Which heads count depends on the half of the model that the class has.
    kinds = {"WhisperForAudioClassification": (encoder,), "WhisperForCausalLM": (decoder,)}
    return {
        "vocab_size": dice.of(16, 32, 97),
        "d_model": width,
        "encoder_layers": dice.of(1, 2),
        "decoder_layers": dice.of(1, 2),
        "encoder_attention_heads": encoder,
        "decoder_attention_heads": decoder,
        "encoder_ffn_dim": dice.of(7, 16, 37),
        "decoder_ffn_dim": dice.of(7, 16, 37),
        "frames": dice.of(6, 10, 14),
        "attn_implementation": dice.of("sdpa", "eager"),
        "num_labels": dice.of(2, 3),
        "use_weighted_layer_sum": cls == "WhisperForAudioClassification" and dice.often(0.3),
        "heads_of": tuple((n, n) for n in kinds.get(cls, (encoder, decoder))),
    }


def _timm(dice: Dice, cls: str, tp: int) -> dict[str, Any]:
    heads = _heads(dice, tp)
    plain: dict[str, Any] = {}
    extras = (
        plain,
        {"qk_norm": True, "init_values": 0.1},
        {"reg_tokens": 2, "class_token": False, "global_pool": "avg", "pre_norm": True},
        {"global_pool": "map", "qkv_bias": False, "proj_bias": False, "class_token": False},
        {"mlp_layer": "SwiGLU"},
        {"mlp_layer": "SwiGLUPacked", "mlp_ratio": 2.0},
        {"block_fn": "ResPostBlock"},
    )
    return {
        "img_size": dice.of(8, 12, 16),
        "embed_dim": heads * dice.of(4, 8),
        "mlp_ratio": dice.of(0.75, 2.0),
        "depth": dice.of(1, 2, 3),
        "num_heads": heads,
        "num_classes": dice.of(2, 3, 10),
        **(plain if cls == "VisionTransformerDistilled" else dice.of(*extras)),
        "heads_of": ((heads, heads),),
    }


MODELS = {"llama": _llama, "bert": _bert, "vit": _vit, "whisper": _whisper, "timm": _timm}


def _batch(dice: Dice, family: str) -> dict[str, Any]:
    batch: dict[str, Any] = {"rows": dice.of(1, 1, 2, 3)}
    if family in ("llama", "bert", "whisper"):
        batch["length"] = dice.of(1, 2, 3, 5, 7, 8, 12)
        batch["labels"] = dice.of("some", "some", "some", "all", "ignored", "none")
    if family in ("llama", "bert"):
        batch["mask"] = dice.of("none", "right", "left", "holes")
        batch["embeds"] = dice.often(0.2)
    return batch
