"""What a meeting leaves in the store, whichever store it is."""

import pytest
import torch.distributed as dist

from shardcore.agree.meeting import _forget


@pytest.mark.timeout(20)
def test_a_store_that_is_a_file_forgets_a_meeting(tmp_path):
    """It says of every key that it has deleted it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    kept, keys = "met/2/step0", ["met/1/count", "met/1/0", "met/1/step0", "met/1/step1"]
    for key in (kept, *keys):
        store.set(key, "")
    _forget(store, "met/1", [0])
    assert store.check([kept])
    assert not any(store.check([key]) for key in keys)
