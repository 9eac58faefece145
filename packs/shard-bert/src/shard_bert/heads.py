"""What the heads of BERT, and of encoders that are built like it, need besides the encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import head, loss, norm, replicate


def rules_of(model: nn.Module) -> ModulePolicy:
    """Return the rules of the heads of a model: a vocabulary is split, its bias beside it too; labels are whole."""
    labels = replicate("classifier", "qa_outputs", "cls.seq_relationship", optional=True)
    rules: dict[str | type[nn.Module] | nn.Module, list[Rule]] = {model: [labels, *_losses(model)]}
    for module in model.modules():
        if isinstance(getattr(module, "decoder", None), nn.Linear):
            rules[module] = [
                replicate("transform.dense", "dense", optional=True),
                norm("transform.LayerNorm", "layer_norm", optional=True),
                head("decoder", bias="bias"),
            ]
    return rules


def _losses(model: nn.Module) -> list[Rule]:
    """Return the rule of a loss that a model computes in its own forward, if its class is known to."""
    if is_for(model, "MaskedLM"):
        return [loss(masked_lm_loss)]
    labels, logits = ("labels", "next_sentence_label"), ("prediction_logits", "seq_relationship_logits")
    return [loss(pretraining_loss, labels=labels, logits=logits)] if is_for(model, "PreTraining") else []


def is_for(model: nn.Module, head: str) -> bool:
    """Tell whether the class of ``model``, or one that it derives from, is named for a head: ``"MaskedLM"``."""
    return any(cls.__name__.endswith(f"For{head}") for cls in type(model).__mro__)


def masked_lm_loss(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of words (B, S, V) against their labels (B, S), -100 where nothing was masked."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def pretraining_loss(model: Any, words: Tensor, order: Tensor, labels: Tensor, follows: Tensor | None) -> Tensor | None:
    """Return the sum of both losses, or None if only one of them could be computed."""
    return None if follows is None else masked_lm_loss(model, words, labels) + cross_entropy(order, follows.flatten())
