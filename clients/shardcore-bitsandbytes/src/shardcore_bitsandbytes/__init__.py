"""Models that bitsandbytes has quantized to 4 bits, sharded: `shardcore.shard` finds this by itself."""
