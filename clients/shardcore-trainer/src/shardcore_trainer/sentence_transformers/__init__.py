"""sentence-transformers: what `shard` says of a whole `SentenceTransformer`."""
