"""One generated class for each sharded module, with what it does in order."""

from __future__ import annotations

import copy
import gc
import pickle
import traceback
import weakref

import pytest
import token_net
import torch
from torch import nn

import shardcore
from shardcore.nn import Replicated, VocabEmbedding
from shardcore.nn.base import LocalModule, ParallelMixin, with_methods
from shardcore.nn.blocks import CompiledBlock
from shardcore.nn.intact import _is_parallel
from shardcore.nn.mixin import add_mixin, mixins, native_class
from shardcore.nn.same_inputs import SameInputs

ORDER: list[str] = []


class Outer(LocalModule):
    keeps_name = True

    def forward(self, *args, **kwargs):
        ORDER.append("outer")
        return super().forward(*args, **kwargs)


class Inner(LocalModule):
    keeps_name = True

    def forward(self, *args, **kwargs):
        ORDER.append("inner")
        return super().forward(*args, **kwargs)


class Native(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: int, *, y: int = 2) -> int:
        ORDER.append("native")
        if self.fails:
            raise RuntimeError("the native forward failed")
        return x + y


def made() -> nn.Module:
    module = Native()
    add_mixin(module, Inner)
    add_mixin(module, Outer)
    return module


def test_one_class_runs_all_of_them_in_order():
    module = made()
    ORDER.clear()
    assert module(1, y=3) == 4
    assert ORDER == ["outer", "inner", "native"]
    assert mixins(module) == (Outer, Inner)
    assert [c for c in type(module).__mro__ if c.__name__ == "Native"] == [type(module), Native]
    assert native_class(type(module)) is Native


def test_modules_with_the_same_mixins_share_a_class():
    assert type(made()) is type(made())


def test_a_mixin_is_added_once():
    module = made()
    before = type(module)
    add_mixin(module, Inner)
    assert type(module) is before


def test_the_signature_is_the_native_one():
    import inspect

    assert list(inspect.signature(made().forward).parameters) == ["x", "y"]


def test_a_traceback_names_them():
    module = made()
    module.fails = True
    with pytest.raises(RuntimeError) as error:
        module(1)
    frames = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert [name for name in frames if name.endswith(".forward")] == ["Outer.forward", "Inner.forward"]


def test_a_complete_class_takes_part():
    module = nn.Embedding(2, 2)
    module.__class__ = VocabEmbedding
    assert mixins(module) == (VocabEmbedding,)
    add_mixin(module, Outer)
    assert mixins(module) == (Outer, VocabEmbedding)
    assert type(module).__name__ == "VocabEmbedding"
    assert native_class(type(module)) is nn.Embedding


def test_a_forward_of_its_own_runs_around_what_serves_its_super():
    class Twice(nn.Embedding):
        def forward(self, ids):
            return ("twice", super().forward(ids))

    class Served(ParallelMixin, nn.Embedding):
        plan_serves_super = True

        def forward(self, ids):
            return "served"

    class Derived(Served):
        def forward(self, ids):
            return ("derived", super().forward(ids))

    found = []
    for mixin in (Served, Derived):
        module = Twice(2, 2)
        add_mixin(module, mixin)
        add_mixin(module, Outer)
        assert mixins(module) == (Outer, mixin)
        assert isinstance(module, Twice)
        found.append(super(Outer, module).forward(None))
    # What is derived from it computes all by itself.
    assert found == [("twice", "served"), ("derived", "served")]


def test_what_others_put_on_top_stays_below_what_comes_later():
    module = Native()
    add_mixin(module, Inner)

    class Foreign(type(module)):  # type: ignore[misc]
        pass

    module.__class__ = Foreign
    add_mixin(module, Outer)
    assert isinstance(module, Foreign)
    assert mixins(module) == (Outer, Inner)


def test_users_methods_are_a_mixin():
    module = made()
    with_methods(module, {"forward": lambda self, x: x})
    ORDER.clear()
    assert module(7) == 7
    assert ORDER == []
    assert [b.__name__ for b in mixins(module)] == ["ReplacedMethods", "Outer", "Inner"]
    add_mixin(module, Replicated)
    assert [b.__name__ for b in mixins(module)] == ["Replicated", "ReplacedMethods", "Outer", "Inner"]


def test_copies_and_pickles():
    module = made()
    assert type(copy.deepcopy(module)) is type(module)
    again = pickle.loads(pickle.dumps(module))
    assert mixins(again) == (Outer, Inner)
    assert type(again) is type(module)


def test_classes_of_users_can_be_collected():
    class Users(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module: nn.Module = Users()
    add_mixin(module, Inner)
    with_methods(module, {"extra": lambda self: 1})
    seen = weakref.ref(Users)
    del module, Users
    gc.collect()
    assert seen() is None


def planned_and_made():
    model = token_net.Model().double()
    config = shardcore.ShardConfig(tensor_parallel_size=2, enable_sequence_parallelism=True)
    planned = shardcore.compile_plan(token_net.ModelPolicy, model, config).mixins()
    shardcore.shard(model, policy=token_net.ModelPolicy, tp=2, enable_sequence_parallelism=True)
    # Which ranks compare their lookups is no matter of a plan.
    made = {path: tuple(b for b in mixins(m) if b is not SameInputs) for path, m in model.named_modules() if path}
    return planned, made


def test_a_plan_says_what_modules_will_do(pool):
    for planned, made in pool.run(planned_and_made, world=2):
        assert planned == {path: own for path, own in made.items() if own}
        assert [b.__name__ for b in planned["stack.blocks.1"]] == ["SequenceEnd", "SequenceBlock"]


class Derived(Outer):
    """Its forward is inherited, and runs after what stands between the two."""


def test_a_mixin_that_inherits_its_forward_skips_none():
    module = Native()
    for mixin in (Outer, Inner, Derived):
        add_mixin(module, mixin)
    ORDER.clear()
    module(1)
    assert ORDER == ["inner", "outer", "native"]


def test_names_for_planning_hide_none_of_a_model():
    """They stand before those of the native class."""
    known = {
        "from_native_module",
        "keeps_name",
        "kept_options",
        "layouts",
        "native_classes",
        "option_names",
        "problem",
        "swap_class",
    }
    public = {name for name in vars(ParallelMixin) if not name.startswith(("_", "plan_"))}
    assert public <= {*known, "refusal"}


def test_functions_of_others_keep_their_names():
    class Mine(nn.Module):
        def forward(self, x):
            return x

    with_methods(made(), {"forward": Mine.forward})
    assert Mine.forward.__code__.co_name == "forward"

    class Linear(ParallelMixin, nn.Linear):
        forward = nn.Linear.forward

    assert nn.Linear.forward.__code__.co_name == "forward"


def test_a_class_on_top_is_not_lost_in_a_pickle():
    module = made()

    class Users(type(module)):  # type: ignore[misc]
        pass

    module.__class__ = Users
    with pytest.raises(shardcore.WrapError, match="cannot be pickled"):
        pickle.dumps(module)


def test_compiled_blocks_are_pickled_after_a_step():
    block = Native()
    add_mixin(block, CompiledBlock)
    block.__dict__["_shard_compiled"] = (lambda: None, None)
    again = pickle.loads(pickle.dumps(block))
    assert mixins(again) == (CompiledBlock,)
    assert "_shard_compiled" not in again.__dict__


def test_replaced_methods_leave_a_module_foreign():
    module = Native()
    with_methods(module, {"forward": lambda self, x: x})
    assert not _is_parallel(module)
    add_mixin(module, Inner)
    assert _is_parallel(module)


def replicas():
    class Staged(token_net.ModelPolicy):
        stages = shardcore.Stages(first="embeddings", blocks="stack.blocks", last="head")

    model = shardcore.shard(token_net.Model().double(), policy=Staged, tp=1, dp=2)
    return [b.__name__ for b in mixins(model.stack)]


def test_parts_of_replicas_run_on_the_models_stream(pool):
    for names in pool.run(replicas, world=2):
        assert "RngScope" in names


def test_no_mixins():
    assert mixins(Native()) == ()
    assert mixins(ParallelMixin) == (ParallelMixin,)
