"""A Falcon has the attention that it was made with: what the plan says of it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shard_falcon.cases import build
from shard_falcon.policy import FalconPolicy
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore_transformers import _attention


def _plan(model, switch):
    policy = FalconPolicy()
    policy.set_model(model)
    with mock.patch.object(_attention, "_installed", return_value=["flash_attention_3"]):
        return compile_plan(policy, model, ShardConfig.of(tp=2, enable_flash_attention=switch), device_type="cuda")


def test_flash_attention_is_that_of_the_model_or_refused():
    model = build("FalconForCausalLM", attn_implementation="sdpa").to(torch.bfloat16)
    words = "transformers chooses the attention of a FalconForCausalLM when it is made, and this one has 'sdpa'"
    with pytest.raises(PlanError, match=f"flash attention is impossible: {words}"):
        _plan(model, True)
    (choice,) = _plan(model, "auto").choices
    assert choice.outcome.startswith(f"off: {words}")
    model.config._attn_implementation_internal = "flash_attention_2"  # as if it was made with it
    assert "enable_flash_attention: flash_attention_2" in _plan(model, True).render()
