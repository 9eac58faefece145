"""How Gemma 4 with images and sounds is sharded, and what it reads of the table of words."""

from __future__ import annotations

from typing import Any

from shard_gemma.fourth import Gemma4Policy
from shard_vlm.policy import VisionLanguagePolicy
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import delegate, replicate


class _WholeWordsPolicy(Gemma4Policy):
    """Gemma 4 whose table of words is whole on every rank."""

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        _, *others = super().decoder()
        return [replicate("embed_tokens"), *others]


class Gemma4MultimodalPolicy(VisionLanguagePolicy):
    """Gemma 4 with images and sounds. Where each block reads of the words, the model looks one word up by itself.

    So the table of words, and the head that is tied to it, are whole on every rank then.
    """

    def module_policy(self) -> ModulePolicy:
        """Return the rules of what joins the models inside, and of the head."""
        rules = dict(super().module_policy())
        text: Any = self.inside.language_model
        if text.config.hidden_size_per_layer_input:
            inside = [rule for rule in rules[self.inside] if "language_model" not in rule.text]
            rules[self.inside] = [*inside, delegate("language_model", policy=_WholeWordsPolicy)]
            if self.inside is not self.model:
                _, *others = rules[self.model]
                rules[self.model] = [replicate("lm_head"), *others]
        return rules
