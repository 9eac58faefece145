"""What ranks have to hold alike besides weights: one difference is one error that names it and both sides."""

from __future__ import annotations

import enum
import functools
import math
import time
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import TinyPolicy, build
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.agree import fingerprint
from shardcore.agree.fingerprint import model_items, versions
from shardcore.errors import AgreementError

ATTRIBUTE = (
    "Nothing was changed. Give it the same value on every rank, or set it after shard() if ranks may differ in it."
)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class OwnNorm(nn.LayerNorm):
    pass


def _refusal(change, **arguments):
    """Shard after ``change`` on rank 1 only; return the error of all ranks, which leaves the model as it was."""
    model = build()
    if dist.get_rank() == 1:
        change(model, arguments)
    arguments = {"policy": TinyPolicy, "tp": 2, **arguments}
    with pytest.raises(AgreementError) as caught:
        shardcore.shard(model, **arguments)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return str(caught.value)


def _first(model):
    return model.model.layers[0]


def _swap_class(model, _):
    _first(model).norm1.__class__ = OwnNorm


def _sgd(model, arguments):
    arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)


CHANGES = {
    "config.dropout: 0.0 on rank 0, 0.5 on rank 1": lambda m, _: setattr(m.config, "dropout", 0.5),
    "config.checkpoint: nothing on rank 0, 'reentrant' on rank 1": lambda m, _: setattr(
        m.config, "checkpoint", "reentrant"
    ),
    "model.layers.0.norm1.eps: 1e-05 on rank 0, 0.5 on rank 1": lambda m, _: setattr(_first(m).norm1, "eps", 0.5),
    "model.layers.1.mlp.drop.p: 0.0 on rank 0, 0.25 on rank 1": lambda m, _: setattr(
        m.model.layers[1].mlp.drop, "p", 0.25
    ),
    "the class of model.layers.0.norm1: torch.nn.modules.normalization.LayerNorm on rank 0": (_swap_class),
    "the training mode of model.norm: nothing on rank 0, False on rank 1": lambda m, _: m.model.norm.eval(),
    "the training mode: True on rank 0, False on rank 1": lambda m, _: m.eval(),
    "the dtype of model.norm.weight: torch.float64 on rank 0, torch.float32 on rank 1": lambda m, _: (
        m.model.norm.float()
    ),
    "requires_grad of head.bias: True on rank 0, False on rank 1": lambda m, _: m.head.bias.requires_grad_(False),
    "the argument wrap: True on rank 0, False on rank 1": lambda m, arguments: arguments.update(wrap=False),
    "the argument optimizer: not given on rank 0, given on rank 1": _sgd,
}


def differences():
    found = {what: _refusal(change) for what, change in CHANGES.items()}
    for what, message in found.items():
        assert message.startswith(f"ranks 0 and 1 differ in {what}"), (what, message)
    return found


def test_a_difference_is_named_with_both_values(pool):
    zero, one = pool.run(differences, world=2)
    assert zero == one
    eps = "model.layers.0.norm1.eps: 1e-05 on rank 0, 0.5 on rank 1"
    assert zero[eps] == f"ranks 0 and 1 differ in {eps}. {ATTRIBUTE}"
    texts = list(zero.values())
    assert not any("packs" in text for text in texts)
    assert [text.endswith("Build the same model on every rank.") for text in texts].count(True) == 1


def another_optimizer():
    model = build()
    rate = 0.1 if dist.get_rank() == 0 else 0.2
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with pytest.raises(AgreementError, match=r"optimizer\.param_groups\.0\.lr: 0\.1 on rank 0, 0\.2 on rank 1"):
        shardcore.shard(model, policy=TinyPolicy, tp=2, optimizer=optimizer)


def test_optimizers_that_differ(pool):
    pool.run(another_optimizer, world=2)


def allowed():
    """What may rightly differ."""
    rank = dist.get_rank()
    model = build()
    model.rank = model.local_rank = rank
    model.is_main_process = rank == 0
    model.device = torch.device("cuda", rank)
    model.where, model.name_or_path = f"cuda:{rank}", f"checkpoint-{rank}"
    model.cache_dir = model.saved_in = f"/tmp/rank{rank}"
    model.logger = object() if rank == 0 else None
    model.names = {"a", "b", "c"} if rank == 0 else {"c", "b", "a"}
    model.settings = {"x": 1, "y": 2} if rank == 0 else {"y": 2, "x": 1}
    model.limit = math.nan
    model._private = rank
    model.config._name_or_path, model.config.transformers_version = f"p{rank}", f"5.{rank}"
    if rank == 0:
        model.register_forward_hook(lambda module, args, output: None)
    shardcore.shard(model, policy=TinyPolicy, tp=2)
    assert isinstance(model.head.weight, DTensor)


def test_what_may_differ_is_left_out(pool):
    pool.run(allowed, world=2)


def _described(**attributes):
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return dict(list(model_items(module))[1:])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1.0, 1.5),
        (True, False),
        ("a", "b"),
        (None, 1.0),
        (Kind.ONE, Kind.TWO),
        (F.silu, F.relu),
        (nn.GELU, nn.ReLU),
        (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu, approximate="none")),
        (torch.float32, torch.bfloat16),
        ((1, 2), (1, 3)),
        ([1, None], [1, 2]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        ([{"a": 1}], [{"a": 2}]),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
        (slice, object),
    ],
)
def test_plain_values_are_compared(one, other):
    assert _described(x=one) == _described(x=one)
    assert _described(x=one) != _described(x=other)


def test_rates_of_dropped_paths_are_no_paths():
    assert _described(drop_path=0.1) == {"drop_path": "0.1"}


def test_one_module_in_two_places_is_not_two_modules():
    shared, apart = nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())
    shared[1] = shared[0]
    assert list(model_items(shared)) != list(model_items(apart))


def test_versions_are_those_of_the_libraries_of_the_class(monkeypatch):
    class Own(build().__class__):
        pass

    Own.__module__ = "somewhere.else"
    monkeypatch.setattr(fingerprint, "_version", lambda library: {"tiny": "1.5"}.get(library, ""))
    assert versions(Own(build().config)) == [
        ("the version of shardcore", shardcore.__version__),
        ("the version of torch", torch.__version__),
        ("the version of tiny", "1.5"),
    ]


def other_torch():
    if dist.get_rank() == 1:
        torch.__version__, kept = "9.9", torch.__version__
    try:
        with pytest.raises(AgreementError, match=r"the version of torch: .* on rank 0, 9.9 on rank 1.* same version"):
            shardcore.shard(build(), policy=TinyPolicy, tp=2)
    finally:
        if dist.get_rank() == 1:
            torch.__version__ = kept


def test_ranks_with_other_libraries(pool):
    pool.run(other_torch, world=2)


def test_describing_a_deep_model_is_quick():
    with torch.device("meta"):
        model = build(layers=32)
    took = []
    for _ in range(3):
        start = time.process_time()
        assert len(list(model_items(model))) > 1000
        versions(model)
        took.append(time.process_time() - start)
    assert min(took) < 0.1


class Kinds(nn.Module):
    """Has a buffer for each kind of layer, in the order of ``list(set(config.kinds))`` of some process."""

    def __init__(self, order, value=1.0):
        super().__init__()
        self.config = types.SimpleNamespace(kinds=["sliding", "full", "sliding"])
        self.kinds = list(order)
        for kind in self.kinds:
            self.register_buffer(kind, torch.full((3,), value * len(kind)))


def in_order_of_hashes():
    order, model = ("full", "sliding")[:: 1 - 2 * dist.get_rank()], build()
    model.kinds = Kinds(order)
    shardcore.shard(model, policy=TinyPolicy, tp=2)
    assert isinstance(model.head.weight, DTensor)
    assert model.kinds.kinds == list(order)
    model = build()
    model.kinds = Kinds(order, value=1.0 - dist.get_rank())
    shardcore.shard(model, policy=TinyPolicy, tp=2, sync_from=0)
    assert {name: buffer.tolist() for name, buffer in model.kinds.named_buffers()} == {
        "full": [4.0] * 3, "sliding": [7.0] * 3,
    }  # fmt: skip


def test_the_order_of_a_set_is_no_difference(pool):
    pool.run(in_order_of_hashes, world=2)


def test_a_configuration_is_asked_for_lists_alone():
    class Computes:
        @property
        def depth(self):
            raise RuntimeError("not known yet")

    module = Kinds(("full", "sliding"))
    module.config, module.depth = Computes(), 3
    assert dict(model_items(module))["depth"] == "3"
    module.config = types.SimpleNamespace(kinds=[{"full": 1}])
    assert dict(model_items(module))["kinds"] == "['full', 'sliding']"


def test_any_other_order_is_one():
    one, other = Kinds(("full", "sliding")), Kinds(("sliding", "full"))
    assert list(model_items(one)) == list(model_items(other))
    for module in (one, other):
        module.more = list(module.kinds)  # nothing of the configuration
        module.config.kinds = ["sliding", "full"]
    assert dict(model_items(one))["more"] != dict(model_items(other))["more"]
    assert list(model_items(one))[:-1] == list(model_items(other))[:-1]
    other.config.kinds = ["full", "sliding"]
    assert dict(model_items(one))["config.kinds"] != dict(model_items(other))["config.kinds"]
    one.kinds = ["full", "full", "sliding"]
    assert dict(model_items(one))["kinds"] == "['full', 'full', 'sliding']"
