"""How models of images, sounds and text are sharded: each model inside by the policy of its class, joints whole."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import calls, delegate, head, replicate
from shardcore_transformers import PretrainedPolicy


class VisionLanguagePolicy(PretrainedPolicy):
    """Towers, projectors that make tokens of what these see or hear, and a language model, whichever they are."""

    @override
    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        self.inside = getattr(model, "model", model)
        children = dict(self.inside.named_children())
        self.models = tuple(name for name, child in children.items() if isinstance(child, PreTrainedModel))
        parameters = (name for name, _ in self.inside.named_parameters(recurse=False))
        self.joints = (*(name for name in children if name not in self.models), *parameters)
        self.stages = Stages(blocks=self.models, between=self.joints)
        if self.inside is not model:
            then = tuple(name for name, child in model.named_children() if child is not self.inside)
            self.stages = self.stages.under("model", then=then)

    def module_policy(self) -> ModulePolicy:
        """Return the rules of what joins the models inside, and of the head."""
        rules: ModulePolicy = {self.inside: [*map(delegate, self.models), replicate(*self.joints, optional=True)]}
        if self.inside is self.model:
            return rules
        heads = [head("lm_head", optional=True), replicate("score", optional=True)]
        alone = [name for name in ("get_image_features", "get_audio_features") if hasattr(self.model, name)]
        return {**rules, self.model: [*heads, *([calls(*alone)] if alone else [])]}
