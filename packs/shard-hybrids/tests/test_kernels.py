"""Kernels that compute all of a mixer: they know nothing of the part of its last linear that a rank has."""

import pytest
from transformers.models.bamba import modeling_bamba
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.nemotron_h import modeling_nemotron_h

import shardcore
from shard_hybrids.cases import cases
from shardcore.comm.strided import torch_lacks

EXPERTS = pytest.mark.skipif(torch_lacks() is not None, reason="fused experts need torch 2.12")
MODULES = {
    "bamba": modeling_bamba,
    "falconh1": modeling_falcon_h1,
    "granitemoehybrid": modeling_granitemoehybrid,
    "nemotronh": modeling_nemotron_h,
}


def trains(family):
    called = []
    kernel = "mamba2_split_conv1d_scan_combined"
    native = getattr(MODULES[family], kernel)
    setattr(MODULES[family], kernel, lambda *args, **kwargs: called.append(1))
    try:
        (case,) = (case for case in cases() if case.name == f"{family}_causal_lm")
        model = case.build().train()
        model(**case.inputs(model, 0))
        assert called, "the unsharded model asks for it"
        called.clear()
        sharded = shardcore.shard(model, tp=2)
        sharded(**case.inputs(sharded, 0))["loss"].backward()
        assert not called
        assert all(module.training for module in sharded.modules())
    finally:
        setattr(MODULES[family], kernel, native)


@pytest.mark.parametrize(
    "family", ["bamba", "falconh1", *(pytest.param(name, marks=EXPERTS) for name in ("granitemoehybrid", "nemotronh"))]
)
def test_mixers_compute_step_by_step(pool, family):
    pool.run(trains, family)
