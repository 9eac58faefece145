from torch import nn

from shardcore import Policy, ShardConfig, compile_plan
from shardcore.policy import Stages
from shardcore.styles import norm, region, replicate


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 4)


class Model(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block(width) for width in widths)


class ModelPolicy(Policy):
    def module_policy(self):
        return {
            "Model": [replicate("embed")],
            "Block": [norm("norm"), region(col="up", row="down")],
        }


def _text(*widths, tp=2, policy=ModelPolicy):
    return compile_plan(policy, Model(*widths), ShardConfig(tensor_parallel_size=tp)).render()


def test_equal_blocks_are_shown_once():
    head, *lines = _text(8, 8, 8).split("\n")
    assert head.startswith(f"Model by {ModelPolicy.__module__}.ModelPolicy, tp 2, digest ")
    assert lines == [
        "embed",
        "    Replicated",
        "    weight (7, 4) -> (7, 4)  replicated",
        "blocks.{0-2}.norm",
        "    Replicated",
        "    weight (4) -> (4)  replicated",
        "    bias (4) -> (4)  replicated",
        "blocks.{0-2}.up",
        "    ColumnLinear(enters=False)",
        "    enters with 'input' for up, leaves at down",
        "    weight (8, 4) -> (4, 4)  split on dim 0",
        "    bias (8) -> (4)  split on dim 0",
        "blocks.{0-2}.down",
        "    RowLinear",
        "    weight (4, 8) -> (4, 4)  split on dim 1",
        "    bias (4) -> (4)  replicated",
    ]


def test_blocks_that_differ_are_shown_apart():
    text = _text(8, 6, 8)
    assert "blocks.{0,2}.up" in text
    assert "blocks.1.up" in text
    assert "weight (6, 4) -> (3, 4)" in text
    assert "blocks.{0-2}.norm" in text


def test_one_rank_changes_nothing():
    text = _text(8, tp=1)
    assert "tp 1" in text
    assert "ColumnLinear" not in text
    assert "weight (8, 4) -> (8, 4)" in text


class WholePolicy(Policy):
    stages = Stages(first="embed", blocks="blocks")

    def module_policy(self):
        return {"Model": [replicate("embed")], "Block": [norm("norm"), replicate("up", "down")]}


class SplitPolicy(ModelPolicy):
    stages = WholePolicy.stages


def test_blocks_of_which_nothing_is_split_are_named():
    said = "nothing in blocks is split: each of the 2 ranks holds and computes all of these blocks"
    lines = {policy: _text(8, policy=policy).split("\n") for policy in (WholePolicy, SplitPolicy)}
    assert lines[WholePolicy][1] == said
    assert said not in lines[SplitPolicy]
    assert "nothing in" not in _text(8, tp=1, policy=WholePolicy)
