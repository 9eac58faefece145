"""How the towers and the language models of Qwen-VL are sharded; what joins them is in `shard_vlm.policy`."""

from __future__ import annotations

from typing import ClassVar

from shard_qwen.policy import Qwen3MoePolicy, Qwen3Policy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, norm, outputs, per_rank, region, replicate, segments, vocab
from shardcore_transformers import PretrainedPolicy


class Qwen2VLTowerPolicy(PretrainedPolicy):
    """Qwen2-VL: the patches of all images follow one another, each image attends to itself, neighbours are merged."""

    stages = Stages(first="patch_embed", blocks="blocks", last="merger", everywhere="rotary_pos_emb")
    #: The attribute of the norms with epsilon; None if they subtract the mean.
    rms: ClassVar[str | None] = None
    #: The linears of the MLP.
    columns: ClassVar[tuple[str, ...]] = ("fc1",)
    row: ClassVar[str] = "fc2"
    #: The norm of what merges neighbours, and its linears.
    merger: ClassVar[tuple[str, str, str]] = ("ln_q", "mlp.0", "mlp.2")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower, of its blocks, and of what merges."""
        normalizes, column, row = self.merger
        return {
            self.model: [replicate("pos_embed", optional=True)],
            type(self.model.patch_embed): [replicate("proj")],
            type(self.model.blocks[0]): [
                norm("norm1", "norm2", rms=self.rms),
                self.projections(),
                attribute("attn.num_heads", per_rank),
                region(enter="mlp", col=tuple(f"mlp.{name}" for name in self.columns), row=f"mlp.{self.row}"),
            ],
            type(self.model.merger): [norm(normalizes, rms=self.rms), region(col=column, row=row)],
        }

    def projections(self) -> Rule:
        """Return the rule of the attention of a block."""
        return region(col=segments("attn.qkv", 3), row="attn.proj", heads="attn.num_heads")


class Qwen25VLTowerPolicy(Qwen2VLTowerPolicy):
    """Qwen2.5-VL: most blocks attend within windows, norms and MLP are those of Llama."""

    rms: ClassVar[str | None] = "variance_epsilon"
    columns: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    row: ClassVar[str] = "down_proj"


class Qwen3VLTowerPolicy(Qwen2VLTowerPolicy):
    """Qwen3-VL: what several blocks return is merged, each by a merger of its own."""

    stages = Stages(
        first=("patch_embed", "pos_embed"),
        blocks="blocks",
        last=("merger", "deepstack_merger_list"),
        everywhere="rotary_pos_emb",
    )
    columns: ClassVar[tuple[str, ...]] = ("linear_fc1",)
    row: ClassVar[str] = "linear_fc2"
    merger: ClassVar[tuple[str, str, str]] = ("norm", "linear_fc1", "linear_fc2")


class Qwen3VLTextPolicy(Qwen3Policy):
    """Qwen3-VL: between its first blocks, features of the images are added to their tokens, so tokens stay together."""

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [vocab("embed_tokens"), norm(self.final, rms=self.rms), outputs(attentions="heads")]


class Qwen3VLMoeTextPolicy(Qwen3VLTextPolicy, Qwen3MoePolicy):
    """Qwen3-VL with experts."""
