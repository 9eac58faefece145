"""Packs whose plan is wrong on purpose: it splits nothing, misses what it names, or is not the same twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import kit_net
from kit_net import NetPolicy

from shardcore.policy import Stages
from shardcore.styles import (
    attribute,
    head,
    local_groups,
    norm,
    region,
    replicate,
    vocab,
)


class NothingSplit(NetPolicy):
    """Everything is replicated: all numbers are right, and nothing is gained."""

    def module_policy(self) -> Any:
        return {"Net": [replicate("embed", "head", "encode", "decoder")]}


class OnlyTheVocabulary(NetPolicy):
    """The vocabulary is split, and every block is replicated."""

    def module_policy(self) -> Any:
        return {"Net": [vocab("embed"), head("head"), replicate("encode", "decoder")]}


class NormBeforeTheBlocks(NetPolicy):
    """The last norm is said to be of the first stage."""

    stages = Stages(first=("embed", "encode", "positions", "decoder.norm"), blocks="decoder.layers", last="head")


class OneLinearWhole(NetPolicy):
    """A linear of every block is replicated, for no reason."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        block = [r for r in rows["Block"] if "cross" not in str(r)]
        return {**rows, "Decoder": [norm("norm")], "Block": [*block, replicate("cross")]}


class MissingAttribute(NetPolicy):
    """H13: an attribute that does not exist."""

    def attention(self) -> list[Any]:
        return [*super().attention(), attribute("attention.num_key_value_groups", local_groups)]


class Misspelled(NetPolicy):
    """H14: a row that matches nothing."""

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col=("mlp.gate_proj", "mlp.up"), row="mlp.down")]


class MisspelledOptional(NetPolicy):
    """H14: a row that matches nothing and says that it may: its parameters are left out."""

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col=("mlp.gate_proj", "mlp.up"), row="mlp.down", optional=True)]


_NORMS = {"norm1", "norm2", "norm3"}


class OrderOfASet(NetPolicy):
    """H28: the order of a set decides the order of the plan."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        norms = [norm(name) for name in _NORMS]
        return {**rows, "Block": [*norms, *rows["Block"][1:]]}


class NoSizeCheck(NetPolicy):
    """Sizes that cannot be split are not refused."""

    checks = ()

    def module_policy(self) -> Any:
        return {"Net": [replicate("embed", "head", "encode", "decoder")]}


def digest_cases() -> list[Any]:
    return [dataclasses.replace(kit_net.CASE, policy=OrderOfASet)]


class NoStages(NetPolicy):
    """Nothing says where the model can be cut."""

    stages = None


class TiedHeadNotNamed(NetPolicy):
    """The weight is held as the embedding's, so that the plan has nothing against it; the head itself is nowhere."""

    stages = Stages(first=("embed", "encode", "positions"), blocks="decoder.layers", last="decoder.norm")
