"""``tensor_parallel_mode="2d"``: every tensor of a model is divided over a square of ranks, along two of its dims.

    former = ShardFormer(ShardConfig(tensor_parallel_mode="2d", tensor_parallel_size=4))
    model = former.shard_model(model)

Everything is a DTensor on a mesh of ``rows`` and ``columns``. Ranks of different rows have other entries of the first
dim (tokens of activations, outputs of weights), those of different columns other entries of the last one (features).
"""
