"""Models of models: each part by a policy of its own."""

from __future__ import annotations

import copy

import pytest
import torch
import towers
from given_packs import install, installed, serves
from planned import plan_of, policy_of, problems_of
from tiny import shard
from torch import nn
from towers import Album, AlbumPolicy, LookingPolicy, Pair, PairPolicy, SpeechPolicy, TowerPolicy, batch, build

import shardcore
from shardcore.apply.sharder import ModelSharder
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import AgreementError, NoPolicyError
from shardcore.plan import Stages
from shardcore.styles import col, delegate, head, norm, replicate
from shardcore_testing.parity import assert_close, assert_same_gradients

RECOMPUTED = {"gradient_checkpoint_config": GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)}
SETTINGS = [
    {},
    {"enable_sequence_parallelism": True, **RECOMPUTED},
    {"parallel_output": True, "extra_kwargs": {"slowly": 1}},
]


def exact(kind, policy):
    reference = build(kind)
    for fields in SETTINGS:
        reference.zero_grad()
        sharded = shard(copy.deepcopy(reference), policy, **fields)
        for seed in (0, 1):
            patches, ids = batch(seed)
            with torch.no_grad():
                assert_close(reference(patches, ids), sharded(patches, ids), f"logits with {fields}")
            losses = [model(patches, ids, labels=ids.roll(1, 1)) for model in (reference, sharded)]
            assert_close(*losses, f"loss with {fields}")
            for loss in losses:
                loss.backward()
        assert_same_gradients(reference, sharded, tolerance=1e-12)
        pair = sharded.pair if kind is Album else sharded
        assert pair.first.weight is pair.speech.model.embed.weight


@pytest.mark.parametrize(
    ("kind", "policy", "world"), [(Pair, PairPolicy, 2), (Pair, PairPolicy, 4), (Album, AlbumPolicy, 2)]
)
def test_exact(pool, kind, policy, world):
    pool.run(exact, kind, policy, world=world, timeout=120)


def test_a_part_is_planned_as_if_it_were_the_model():
    plan = plan_of(build(), PairPolicy, tp=4)
    alone = plan_of(build().speech, SpeechPolicy, tp=4)
    layouts = {p.name: p.layout for p in plan.parameters}
    for parameter in alone.parameters:
        assert layouts[f"speech.{parameter.name}"] == parameter.layout
    assert [(part.path, part.policy.rpartition(".")[2]) for part in plan.parts] == [
        ("sight", "TowerPolicy"),
        ("speech", "SpeechPolicy"),
    ]
    assert "speech: TinyLM by towers.SpeechPolicy" in plan.render()
    # Four heads in the tower and eight in the decoder, each by its own configuration: two of the latter on a rank.
    assert any("4 query heads (count) cannot be split over 8" in p for p in problems_of(build(), PairPolicy, tp=8))


def test_stages_of_parts_stand_where_their_names_do():
    assert plan_of(build(Album), AlbumPolicy).stages == Stages(
        first=("scale", "pair.sight.patches"),
        blocks=("pair.sight.layers", "pair.speech.model.layers"),
        between=("pair.bridge", "pair.sight.norm", "pair.speech.model.embed", "pair.speech.model.positions"),
        last=("pair.first", "pair.speech.model.norm", "pair.speech.head"),
    )


def test_recomputed_blocks_ask_their_own_policies():
    asked = []

    class Asked(TowerPolicy):
        def recompute(self, path, block):
            asked.append(path)
            return super().recompute(path, block)

    given = type("Given", (PairPolicy,), {"given": {**PairPolicy.given, "sight": Asked}})
    plan_of(build(), given, **RECOMPUTED)
    assert asked == ["sight.layers.0", "sight.layers.1"]


def hooks_of_parts():
    TowerPolicy.log.clear()
    model = shard(build(), PairPolicy)
    assert TowerPolicy.log == ["before Tower", "after Tower"]
    assert model.sight.by == "its own policy"
    patches, _ = batch()
    return model.sight(patches).shape


def test_hooks_of_parts(pool):
    assert pool.run(hooks_of_parts, world=2) == [(2, 5, 16)] * 2


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = towers.Tower(), nn.Linear(2, 2)
        self.again = self.first


MISTAKES = [
    ([delegate("", policy=PairPolicy), replicate("second")], "it would delegate the module to its own policy again"),
    ([delegate("third", policy=PairPolicy), replicate("second")], "Loose has no submodule 'third'"),
    (
        [delegate("first", policy=TowerPolicy), delegate("first.patches", policy=TowerPolicy), replicate("second")],
        "one is inside of the other",
    ),
    (
        [delegate("first", policy=TowerPolicy), delegate("again", policy=PairPolicy), replicate("second")],
        "it is delegated to two policies, TowerPolicy and PairPolicy",
    ),
    ([delegate("first", policy=TowerPolicy), col("first.patches"), replicate("second")], "the parameter is claimed by"),
    ([delegate("first", policy=PairPolicy), replicate("second")], "no module of class 'Pair'; the model has"),
]


@pytest.mark.parametrize(("rules", "what"), MISTAKES)
def test_mistakes(rules, what):
    assert any(what in problem for problem in problems_of(Loose(), policy_of({"Loose": rules})))


def test_rules_of_the_whole_stay_out_of_parts():
    given = {"Loose": [delegate("first", policy=TowerPolicy), replicate("second")], "Layer": [norm("norm")]}
    assert any("no module of class 'Layer'" in problem for problem in problems_of(Loose(), policy_of(given)))


def test_the_same_part_twice_is_one():
    given = [delegate("first", policy=TowerPolicy), delegate("again", policy=TowerPolicy), replicate("second")]
    assert len(plan_of(Loose(), policy_of({"Loose": given})).parts) == 1


def test_an_optional_part_may_be_absent():
    given = [delegate("first", policy=TowerPolicy), replicate("second"), delegate("third", optional=True)]
    assert plan_of(Loose(), policy_of({"Loose": given})).parts


def test_a_part_in_blocks_needs_stages():
    given = type("Given", (TowerPolicy,), {"stages": None})
    policy = type("Given", (PairPolicy,), {"given": {**PairPolicy.given, "sight": given}})
    assert any("its own policy has no stages" in problem for problem in problems_of(build(), policy))


def test_ties_across_parts_lie_alike():
    policy = type("Given", (PairPolicy,), {})
    rules = {"Pair": [*PairPolicy().module_policy()["Pair"][:2], replicate("bridge", "first")]}
    policy.module_policy = lambda self: rules
    assert any("tied weights" in problem for problem in problems_of(build(), policy))


def _packs(target, version="1.0", speech=True):
    policy = "import towers\nclass ModelPolicy(towers.{}): pass\n"
    install(target, "sight", serves("shard_sight", "towers.Tower"), modules={"policy": policy.format("TowerPolicy")})
    if speech:
        modules = {"policy": policy.format("SpeechPolicy")}
        install(target, "speech", serves("shard_speech", "tiny.TinyLM"), modules=modules, version=version)


def test_packs_serve_parts(tmp_path):
    _packs(tmp_path, version="2.5")
    with installed(tmp_path):
        plan = ModelSharder(build(), LookingPolicy).compile()
        assert [str(part) for part in plan.parts] == [
            "sight: Tower by shard_sight.policy.ModelPolicy (shard-sight 1.0)",
            "speech: TinyLM by shard_speech.policy.ModelPolicy (shard-speech 2.5)",
        ]


def test_a_part_that_no_pack_serves_is_named(tmp_path):
    _packs(tmp_path, speech=False)
    with installed(tmp_path), pytest.raises(NoPolicyError) as caught:
        ModelSharder(build(), LookingPolicy).compile()
    said = str(caught.value)
    assert said.startswith("Pair delegates its part 'speech', a TinyLM, to the pack for it:\nno installed pack serves")
    assert "way out: say delegate('speech', policy=...) in the policy of Pair" in said
    with pytest.raises(NoPolicyError, match="given no delegates="):
        compile_plan(LookingPolicy, build(), ShardConfig(tensor_parallel_size=2))


def other_packs(folder):
    """The decoder's pack has another version on the second rank."""
    rank = torch.distributed.get_rank()
    with installed(folder / str(rank)), pytest.raises(AgreementError) as caught:
        shardcore.shard(build(), policy=LookingPolicy, tp=2)
    return str(caught.value)


def test_ranks_tell_each_other_which_packs_serve_parts(pool, tmp_path):
    for rank in range(2):
        _packs(tmp_path / str(rank), version=f"1.{rank}")
    said = pool.run(other_packs, tmp_path, world=2)
    assert all("the policy of speech" in text and "shard-speech 1.1" in text for text in said)


def test_heads_of_a_part_stay_in_it():
    """Its logits are kept split in calls that give labels to the part itself."""
    split = [step for step in plan_of(build(), PairPolicy, parallel_output=True).steps if step.splits_logits]
    assert {(step.path, step.splits_logits) for step in split} == {("", ("first",)), ("speech", ("speech.head",))}
    assert head("first").text == "head('first')"
