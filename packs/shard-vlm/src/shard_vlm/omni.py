"""How the towers of Qwen-Omni's thinkers are sharded; their language models are those of Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from shard_vlm.qwen import Qwen3VLTowerPolicy, Qwen25VLTowerPolicy
from shard_whisper.policy import WhisperPolicy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import norm, region, replicate


class Qwen25OmniTowerPolicy(Qwen25VLTowerPolicy):
    """The images of Qwen2.5-Omni: those of Qwen2.5-VL, with linears of their own for queries, keys and values."""

    @override
    def projections(self) -> Rule:
        return region(enter="attn", col=("attn.q", "attn.k", "attn.v"), row="attn.proj", heads="attn.num_heads")


class Qwen3OmniTowerPolicy(Qwen3VLTowerPolicy):
    """The images of Qwen3-Omni: those of Qwen3-VL, with mergers under other names."""

    stages = replace(Qwen3VLTowerPolicy.stages, last=("merger", "merger_list"))
    merger: ClassVar[tuple[str, str, str]] = ("ln_q", "mlp.0", "mlp.2")


class Qwen25OmniSoundsPolicy(WhisperPolicy):
    """The sounds of Qwen2.5-Omni: the blocks of Whisper, for pieces of all sounds, one after another."""

    #: What is in front of the blocks, and behind their last norm.
    front: ClassVar[tuple[str, ...]] = ("conv1", "conv2")
    behind: ClassVar[tuple[str, ...]] = ("proj", "audio_bos_eos_token")
    stages = Stages(first=front, blocks="layers", last=("ln_post", *behind), everywhere="positional_embedding")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its blocks."""
        around = [replicate(*self.front, *self.behind), norm("ln_post")]
        return {self.model: around, type(self.model.layers[0]): self.block()}


class Qwen3OmniSoundsPolicy(Qwen25OmniSoundsPolicy):
    """The sounds of Qwen3-Omni: three convolutions of spectra as images, and an MLP behind the last norm."""

    front: ClassVar[tuple[str, ...]] = ("conv2d1", "conv2d2", "conv2d3", "conv_out")
    behind: ClassVar[tuple[str, ...]] = ("proj1", "proj2")
    stages = replace(Qwen25OmniSoundsPolicy.stages, first=front, last=("ln_post", *behind))
