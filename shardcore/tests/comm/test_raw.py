from __future__ import annotations

import pytest
import torch

from shardcore.comm.raw import as_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(21).view(3, 7)[1:2, 0],  # one number, and a stride of 7
        torch.arange(21.0).view(3, 7)[1:2, 2:3].t(),
        torch.arange(8, dtype=torch.bfloat16)[3:],  # begins within the storage
        torch.tensor(True),
        torch.empty(0, 3),
    ],
    ids=["whole", "one of a column", "one of a matrix", "offset", "scalar", "empty"],
)
def test_the_bytes_of_any_contiguous_tensor(tensor):
    raw = as_bytes(tensor)
    assert raw.shape == (tensor.nbytes,)
    assert torch.equal(raw.clone().view(tensor.dtype).view(tensor.shape), tensor)


def test_it_is_the_same_memory():
    whole = torch.zeros(3, 7)
    as_bytes(whole[1:2, 0]).fill_(255)
    assert whole.isnan().nonzero().tolist() == [[1, 0]]
