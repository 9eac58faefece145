"""The training engine: `Booster`, and `HybridParallelPlugin`, which says how a model is trained over ranks.

After ColossalAI's ``colossalai.booster``. A thin layer over `shardcore.shard`, FSDP2 and torch's optimizers.
"""

from shardcore.booster.booster import Boosted, Booster
from shardcore.booster.plugin import HybridParallelPlugin

__all__ = ["Boosted", "Booster", "HybridParallelPlugin"]
