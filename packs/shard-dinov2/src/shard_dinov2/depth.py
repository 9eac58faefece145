"""How models that estimate depth are sharded: the backbone by the policy of its class, what is behind it whole."""

from __future__ import annotations

from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import delegate, replicate
from shardcore_transformers import PretrainedPolicy


class DepthAnythingPolicy(PretrainedPolicy):
    """Depth Anything, with a measured depth to go by or without: convolutions behind a backbone, whichever it is."""

    stages = Stages(blocks="backbone", last=("neck", "head"))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model itself."""
        return {self.model: [delegate("backbone"), replicate("neck", "head")]}
