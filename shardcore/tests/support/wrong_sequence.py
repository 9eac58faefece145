"""Packs that are wrong on purpose where tokens or logits are split."""

from __future__ import annotations

from typing import Any

from kit_net import NetPolicy
from torch import nn
from wrong import Replaced

from shardcore.nn import Replicated, VocabHead
from shardcore.policy import ModulePolicy
from shardcore.styles import outputs


class NoSequence(NetPolicy):
    """Says nothing about tokens, and does not say that it does not."""

    def module_policy(self) -> ModulePolicy:
        description = dict(super().module_policy())
        description["Decoder"] = description["Decoder"][:-1]  # type: ignore[index]  # a list here
        return description


class LocalStates(NetPolicy):
    """H17: captured hidden states are those of one rank's tokens."""

    def captured(self) -> list[Any]:
        return [outputs(attentions="heads")]


class NormsOfTokensNotSummed(Replaced):
    """H38: gradients of norms are those of one rank's tokens."""

    suffix = "norm1"

    def spoil(self, module: nn.Module) -> None:
        if isinstance(module, Replicated):
            module.__dict__["_shard_sequence"] = None


class SamePartOfTheVocabulary(Replaced):
    """H10: every rank takes its logits for the first of the vocabulary."""

    suffix = "head"

    def spoil(self, module: nn.Module) -> None:
        if isinstance(module, VocabHead):
            module._vocabulary = module._vocabulary._replace(start=0)
