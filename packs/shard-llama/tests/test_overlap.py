"""What a backward computes while something is sent."""

from __future__ import annotations

import pytest
import torch
from llama_cases import batch, build, loss_of, shard
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.comm import collectives

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}


class Order(TorchDispatchMode):
    """Notes products, and when a collective starts and ends that something may run beside."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen, self.names = [], []
        made = iter("abcdefghijklmnopqrstuvwxyz")

        seen, names = self.seen, self.names

        class Pending(collectives.Pending):
            def __init__(self, *args):
                super().__init__(*args)
                self.name = next(made)
                names.append(self.name)
                seen.append(f"start {self.name}")

            def wait(self):
                seen.append(f"wait {self.name}")
                return super().wait()

        monkeypatch.setattr(collectives, "Pending", Pending)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in PRODUCTS:
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


def _products_beside(fields):
    model = shard(build("LlamaModel", num_hidden_layers=1), tp=2, **fields)
    loss = loss_of(model(**batch(model, length=8)))
    with pytest.MonkeyPatch.context() as patch, Order(patch) as order:
        loss.backward()
    spans = [(order.seen.index(f"start {name}"), order.seen.index(f"wait {name}")) for name in order.names]
    return [order.seen[start:end].count("product") for start, end in spans]


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        # Weight gradients of gate and up beside the sum of their input's gradient, then of queries, keys and values.
        ({}, [2, 3]),
        # The gather at an exit has nothing beside it, nor has that behind the embedding.
        ({"enable_sequence_parallelism": True}, [0, 2, 0, 3, 0]),
        # What entered is gathered again beside the gradients of it.
        ({"enable_sequence_parallelism": True, "sequence_keep_gathered": False}, [0, 2, 2, 0, 3, 3, 0]),
    ],
    ids=["whole", "divided", "gathered again"],
)
def test_products_run_while_something_is_sent(pool, fields, products):
    assert pool.run(_products_beside, fields, world=2) == [products] * 2
