"""How decoders are sharded of whose blocks some have another mixer in the place of the attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from shard_llama.policy import LlamaPolicy
from shardcore.policy import HeadCounts, ModulePolicy, Rule


class HybridPolicy(LlamaPolicy):
    """A decoder like Llama with mixers of one more class, through which tokens see each other."""

    context: ClassVar[str | tuple[str, ...]] = ()
    #: The class of the mixers that are no attention.
    mixer: ClassVar[str]

    @override
    def module_policy(self) -> ModulePolicy:
        here = any(type(module).__name__ == self.mixer for module in self.model.modules())
        blocks: ModulePolicy = {type(block): self.block() for block in self.base.layers}
        return {**super().module_policy(), **blocks, **({self.mixer: self.mixing()} if here else {})}

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block, if it has one."""
        return [replace(rule, optional=True) for rule in super().attention()]

    def mixing(self) -> list[Rule]:
        """Return the rules of a mixer."""
        raise NotImplementedError


def features(*, query: int = 0, kv: int = 0) -> Callable[[HeadCounts], int]:
    """Return what counts the features of a rank: so many for each of its heads, and for each head that these share."""

    def local_features(heads: HeadCounts) -> int:
        return heads.local_query * query + heads.local_kv * kv

    return local_features
