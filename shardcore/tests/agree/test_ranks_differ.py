"""Ranks with other packs, other versions or other hash seeds: one error on all of them that names both sides."""

from __future__ import annotations

import os
import re
import warnings

import pytest
import torch.distributed as dist
from given_packs import hook, install, installed, serves
from tiny import build
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.errors import AgreementError, NoPolicyError, PackError
from shardcore_testing.parity import assert_same_parameters

POLICY = "from tiny import TinyPolicy\nclass ModelPolicy(TinyPolicy): pass\n"

# A row goes through its names in the order of a set.
UNORDERED = """
from shardcore.styles import norm, replicate
from tiny import TinyPolicy

NAMES = {"norm1", "norm2", "attention.q_norm", "attention.k_norm", "mlp.gate", "mlp.up", "mlp.down"}

class ModelPolicy(TinyPolicy):
    def module_policy(self):
        rows = super().module_policy()
        return {**rows, "Block": [replicate("attention.q_proj", "attention.k_proj", "attention.v_proj"),
                                  replicate("attention.o_proj"), norm(*NAMES)]}
"""

# Which style a row gets depends on what a set has first.
CHOOSING = """
from shardcore.styles import norm, region, replicate
from tiny import TinyPolicy

NAMES = ("mlp", "norm1", "norm2", "attention")

class ModelPolicy(TinyPolicy):
    def module_policy(self):
        rows = super().module_policy()
        split = region(enter="mlp", col=("mlp.gate", "mlp.up"), row="mlp.down")
        chosen = split if next(iter(set(NAMES))) == "mlp" else replicate("mlp")
        return {**rows, "Block": [chosen if "mlp" in row.text else row for row in rows["Block"]]}
"""

SAME_PACKS = "Install the same packs in the same versions on every rank, "


def pack(folder, name="tiny", policy=POLICY, **options):
    install(folder, name, serves(f"shard_{name}"), modules={"policy": policy}, **options)


@pytest.fixture
def folders(tmp_path):
    """One folder for the distributions of each rank."""
    return [tmp_path / "rank0", tmp_path / "rank1"]


def refused(folders):
    """Shard on ranks that differ; return the error and what the traceback would show besides."""
    warnings.simplefilter("ignore")  # of broken packs: what matters is the error that follows
    with installed(folders[dist.get_rank()]):
        model, before = build(), build()
        with pytest.raises(shardcore.ShardcoreError) as caught:
            shardcore.shard(model)
        assert type(model) is type(before)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert_same_parameters(before, model)
        return type(caught.value), str(caught.value), getattr(caught.value, "__notes__", [])


def same_error(results):
    (error, message, _), *others = results
    assert error is AgreementError
    assert all(other[:2] == (error, message) for other in others)
    return message


@pytest.mark.nightly
def test_different_packs(pool, folders):
    pack(folders[0], "one", version="1.5")
    pack(folders[1], "two")
    assert same_error(pool.run(refused, folders, world=2)) == (
        "ranks 0 and 1 differ in the policy's origin: shard_one.policy.ModelPolicy of shard-one 1.5 on rank 0, "
        "shard_two.policy.ModelPolicy of shard-two 1.0 on rank 1. Nothing was changed. "
        f"{SAME_PACKS}and start all ranks with the same SHARDCORE_PACKS and SHARDCORE_DISABLE_PACKS."
    )


def test_different_versions(pool, folders):
    pack(folders[0], version="1.0")
    pack(folders[1], version="1.1rc1")
    message = same_error(pool.run(refused, folders, world=2))
    assert "of shard-tiny 1.0 on rank 0, shard_tiny.policy.ModelPolicy of shard-tiny 1.1rc1 on rank 1. No" in message


def test_other_code_under_one_version(pool, folders):
    """A checkout on one rank has the version of the release on the other."""
    pack(folders[0])
    pack(folders[1], policy=CHOOSING.replace('next(iter(set(NAMES))) == "mlp"', "False"))
    message = same_error(pool.run(refused, folders, world=2))
    assert re.match(r"ranks 0 and 1 differ in step \d+ of the plan: ", message)
    becomes = "becomes shardcore.nn.linear.parallel.ColumnLinear(enters=False)"
    assert f"model.layers.0.mlp.gate {becomes} on rank 0, " in message
    assert "model.layers.0.mlp.gate becomes shardcore.nn.replicated.Replicated() on rank 1. Nothing was cha" in message


@pytest.mark.parametrize(
    ("plugin", "why"), [("", "installed packs:"), ("1 / 0", "tiny (shard-tiny 1.0): broken: Zero")]
)
def test_a_pack_that_one_rank_lacks(pool, folders, plugin, why):
    pack(folders[0])
    folders[1].mkdir()
    if plugin:
        install(folders[1], "tiny", plugin)
    zero, one = pool.run(refused, folders, world=2)
    side = (
        "rank 0 did not fail; the class of the model there: tiny.TinyLM; the policy's origin there: "
        "shard_tiny.policy.ModelPolicy of shard-tiny 1.0"
    )
    assert (zero[0], one[0]) == (AgreementError, NoPolicyError)
    assert why in one[1]
    assert zero[1] == f"rank 1 failed, so no rank was changed. Its error: NoPolicyError: {one[1]}\n{side}"
    assert one[2] == [side]


def test_a_policy_that_one_rank_cannot_import(pool, folders):
    pack(folders[0])
    pack(folders[1], policy="import not_installed_here")
    zero, one = pool.run(refused, folders, world=2)
    assert (zero[0], one[0]) == (AgreementError, PackError)
    assert "Its error: PackError: pack tiny (shard-tiny 1.0): policy 'shard_tiny.policy:ModelPolicy' failed" in zero[1]


def test_a_pack_that_only_observes_on_one_rank(pool, folders):
    for folder in folders:
        pack(folder)
    install(folders[1], "watch", hook("shardcore_before_shard", "raise AssertionError('called')"), version="0.2")
    message = same_error(pool.run(refused, folders, world=2))
    assert message == (
        "ranks 0 and 1 differ in the packs that bring modules or observe: none on rank 0, watch (shard-watch 0.2) on "
        f"rank 1. Nothing was changed. {SAME_PACKS}or leave them out with SHARDCORE_DISABLE_PACKS."
    )


def test_a_pack_that_serves_other_models_may_differ(pool, folders):
    for folder in folders:
        pack(folder)
    install(folders[1], "other", serves("shard_other", "somewhere.Else"))
    pool.run(works, folders, world=2)


def works(folders):
    with installed(folders[dist.get_rank()]):
        model = shardcore.shard(build())
        assert any(isinstance(p, DTensor) for p in model.parameters())
        assert_same_parameters(build(), model)
        return os.environ.get("PYTHONHASHSEED")


def refused_with_order(folders):
    with installed(folders[dist.get_rank()]):
        from shard_tiny import policy

        order = list(set(policy.NAMES))
    return refused(folders), order


def test_a_well_behaved_policy_works_with_any_hash_seed(pool, tmp_path):
    pack(tmp_path)
    assert pool.run(works, [tmp_path] * 2, world=2) == ["1", "2"]


def test_rows_in_the_order_of_a_set(pool, tmp_path):
    pack(tmp_path, policy=UNORDERED)
    results = pool.run(refused_with_order, [tmp_path] * 2, world=2)
    message = same_error([result for result, _ in results])
    first, second = (order for _, order in results)
    names = next((a, b) for a, b in zip(first, second, strict=True) if a != b)
    assert re.match(r"ranks 0 and 1 differ in step \d+ of the plan: ", message)
    for rank, name in enumerate(names):
        assert f"model.layers.0.{name} becomes shardcore.nn.replicated.Replicated() on rank {rank}" in message
    assert message.endswith("A policy must not go by the order of a set, which differs with PYTHONHASHSEED.")


def test_styles_by_the_order_of_a_set(pool, tmp_path):
    pack(tmp_path, policy=CHOOSING)
    results = pool.run(refused_with_order, [tmp_path] * 2, world=2)
    assert len({order[0] == "mlp" for _, order in results}) == 2, results
    message = same_error([result for result, _ in results])
    assert "differ in step " in message
    assert "model.layers.0.mlp.gate becomes shardcore.nn.linear.parallel.ColumnLinear(enters=False) on rank" in message
    assert "model.layers.0.mlp.gate becomes shardcore.nn.replicated.Replicated() on rank" in message
