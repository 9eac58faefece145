"""What a barrier says, and forgets in a store that is a file."""

import re

import pytest
import torch.distributed as dist

from shardcore import MissingRanksError
from shardcore.agree.store_barrier import StoreBarrier, _forget


@pytest.mark.timeout(20)
def test_a_store_that_is_a_file_forgets_a_barrier(tmp_path):
    """It says of every key that it has deleted it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    kept, keys = "met/2/step0", ["met/1/count", "met/1/0", "met/1/step0", "met/1/step1"]
    for key in (kept, *keys):
        store.set(key, "")
    _forget(store, "met/1", [0])
    assert store.check([kept])
    assert not any(store.check([key]) for key in keys)


def meets_alone():
    if dist.get_rank() == 0:
        with pytest.raises(MissingRanksError) as caught:
            StoreBarrier.wait([0, 1], {}, "save_pretrained", patience=1.0)
        assert caught.value.missing == (1,)
        return str(caught.value)
    return ""


def test_a_barrier_that_was_given_up_says_for_how_long_it_was_waited_for(pool):
    said, _ = pool.run(meets_alone, timeout=30)
    assert re.search(r"did not come: 1 \(this one has waited for \d s; the timeout of the process group is 1 s\)", said)
