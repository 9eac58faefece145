"""The names that people know from Shardformer (ColossalAI), as aliases."""

from __future__ import annotations

from shardcore.nn import ColumnLinear, RowLinear, VocabEmbedding

__all__ = ["Linear1D_Col", "Linear1D_Row", "VocabParallelEmbedding1D"]

Linear1D_Col = ColumnLinear
Linear1D_Row = RowLinear
VocabParallelEmbedding1D = VocabEmbedding
