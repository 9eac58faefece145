"""What later releases are to bring: one table for configuration, Shardformer's names, ``doctor`` and docs.

A release number is written nowhere else, but where a test compares it with this table. Imports nothing, so that the
documentation can read it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FIELDS", "LAYER_OPTIONS", "NAMES", "OTHERS", "Planned", "PlannedField", "features"]


@dataclass(frozen=True, slots=True)
class Planned:
    """Something that a later release is to bring.

    Attributes:
        release: that release.
        instead: what does its work until then, as the end of "Until then: ...".
    """

    release: str
    instead: str


@dataclass(frozen=True, slots=True)
class PlannedField(Planned):
    """A field of `shardcore.ShardConfig`, or an option of a layer, some of whose values a later release is to bring.

    Attributes:
        works: the values that this release takes.
        feature: what the others ask for, in words; None if the field is a detail of another one's.
    """

    works: tuple[Any, ...]
    feature: str | None = None


#: By the name of the field.
FIELDS = {
    "context_parallel_size": PlannedField(
        "0.5", "use tensor and data parallelism", (None, 1), feature="context parallelism"
    ),
    "tensor_parallel_mode": PlannedField("1.0", "use '1d'", ("1d",), feature="tensor parallelism in 2d, 2.5d and 3d"),
    "sequence_parallelism_mode": PlannedField(
        "0.5", "use 'split_gather'", (None, "split_gather"), feature="ring and all-to-all sequence parallelism"
    ),
    "enable_sequence_overlap": PlannedField(
        "0.3", "leave it False", (False,), feature="overlapped sequence parallelism"
    ),
    "enable_flash_attention": PlannedField(
        "0.3",
        "True or 'auto' takes flash-attn, and attn_implementation='sdpa' of transformers what torch has",
        (None, False, True, "auto"),
        feature="xFormers attention",
    ),
    "fp8_communication": PlannedField("0.5", "leave it False", (False,), feature="fp8 communication"),
    "make_vocab_size_divisible_by": PlannedField(
        "0.5", "leave it None: a vocabulary of any size is split unevenly", (None,)
    ),
}

#: By a name that people know from Shardformer; see `shardcore_shardformer`.
NAMES = {
    "Embedding1D": Planned("0.5", "VocabParallelEmbedding1D, which splits the vocabulary instead of the features"),
    "FusedLinear1D_Row": Planned("0.3", "Linear1D_Row after FusedLinear1D_Col"),
    "ColoAttention": Planned("0.5", "the attention of the model's library: attn_implementation='sdpa'"),
    "FusedLinear": Planned("0.3", "torch.nn.Linear, which a policy replicates"),
    "GPT2FusedLinearConv": Planned("0.3", "a ParallelModule of your own"),
    "GPT2FusedLinearConv1D_Col": Planned("0.3", "FusedLinear1D_Col, which takes transformers' Conv1D"),
    "GPT2FusedLinearConv1D_Row": Planned("0.3", "Linear1D_Row, which takes transformers' Conv1D"),
    "PaddingEmbedding": Planned("0.5", "VocabParallelEmbedding1D: a vocabulary of any size is split unevenly"),
    "PaddingLMHead": Planned("0.5", "VocabParallelLMHead1D: a vocabulary of any size is split unevenly"),
    "RingAttention": Planned("0.5", "shardcore.shard(model, enable_sequence_parallelism=True)"),
}

#: Options of Shardformer's layers, by name; their values that ask for nothing are accepted.
LAYER_OPTIONS = {
    "seq_parallel_mode": PlannedField("0.5", "shardcore.shard(model, enable_sequence_parallelism=True)", (None,)),
    "seq_parallel_dim": PlannedField("0.5", "leave it 1, the dim of the sequence", (None, 1)),
    "overlap": PlannedField("0.3", "leave it False", (None, False)),
    "fp8_communication": PlannedField("0.5", "leave it False", (None, False)),
    "skip_bias_add": PlannedField("0.3", "leave it False, and the bias is added", (None, False)),
    "stream_chunk_num": PlannedField("0.5", "leave it 1", (None, 1)),
    "make_vocab_size_divisible_by": PlannedField(
        "0.5", "leave it out: a vocabulary of any size is split unevenly", (None, 1)
    ),
    "split_sizes": PlannedField("0.3", "segments=3, if there are three equal ones", (None,)),
}

#: What only the documentation names: the first word of a row of its tables, and the release.
OTHERS = {
    "xFormers": FIELDS["enable_flash_attention"].release,
    "ChatGLM-2": "0.5",
}


def features() -> dict[str, str]:
    """Return what this release lacks, in words, and the release that is to bring it."""
    return {field.feature: field.release for field in FIELDS.values() if field.feature is not None}
