"""Adapters of PEFT on sharded models: attached before `shard` or after it, trained, saved, loaded and switched.

```python
model = shardcore.shard(get_peft_model(model, config), tp=2)          # peft's own get_peft_model, before
model = shardcore_peft.get_peft_model(sharded, config)   # after
```
"""

from shardcore_peft._hotswap import hotswap_adapter
from shardcore_peft._models import adding, from_pretrained, get_peft_model, load_into, refuse_unplaced

__all__ = ["adding", "from_pretrained", "get_peft_model", "hotswap_adapter", "load_into", "refuse_unplaced"]
