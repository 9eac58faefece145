"""The names and the snippets of Shardformer and the tensor-parallel RFC.

The snippets are the originals; an import line names shardcore, and ``cuda`` and ``nccl`` are ``cpu`` and ``gloo`` here.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import shardcore
import shardcore_shardformer as compat
from shardcore.errors import NotSupportedError
from shardcore_testing.parity import assert_close

DOCS = Path(__file__).parents[3] / "docs" / "compat.md"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def _model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(torch.float64)


def _x():
    return torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


IMPORTS = """
import torch
from typing import Any, Callable, Dict, List
import shardcore as colossalai
from shardcore_shardformer import ShardFormer, Policy, ParallelModule, ModelSharder
from shardcore_shardformer import ModulePolicyDescription, ShardConfig, SubModuleReplacementDescription
from shardcore_shardformer import Linear1D_Col, Linear1D_Row
"""


def _run(snippet, **names):
    """Run a snippet after its import lines, which ``names`` adapt further."""
    space = {"__name__": "snippet"}
    exec(compile(IMPORTS, "imports", "exec"), space)
    space |= names
    snippet = snippet.replace("'cuda'", "'cpu'").replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
    exec(compile(snippet, "snippet", "exec"), space)
    return SimpleNamespace(**space)


WRITE_YOUR_OWN = """
class MyPolicy(Policy):
    # implement your own policy
    def module_policy(self):
        return {
            "Block": ModulePolicyDescription(
                attribute_replacement={"num_heads": 2},
                param_replacement=[],
                sub_module_replacement=[
                    SubModuleReplacementDescription(suffix="up", target_module=Linear1D_Col, kwargs=None),
                    SubModuleReplacementDescription(suffix="down", target_module=Linear1D_Row),
                ],
            )
        }
"""

USE_IT = """
# use customized policy to shard model
my_policy = MyPolicy()
shard_former.shard_model(model, my_policy)
"""

USER_FACING = """
shard_former = ShardFormer(shard_config=shard_config)
shard_former.init_distributed()
model = shard_former.shard_model(model, policy=policy)
dataloader = shard_former.shard_dataset(dataset)
"""

QUICK_START = """
# launch colossalai
colossalai.launch_from_torch()

shard_config = ShardConfig(tensor_parallel_size=2,
                           data_parallel_size=1,
                           gather_output=True)
shard_former = ShardFormer(shard_config=shard_config)
shard_former.init_distributed()
"""


def customized_policy():
    reference, model = _model(), _model()
    done = _run(QUICK_START + WRITE_YOUR_OWN + USE_IT, model=model)
    assert done.colossalai is shardcore
    assert_close(reference(_x()), model(_x()), "output")
    assert model[0].num_heads == 2
    assert isinstance(model[0].up, compat.Linear1D_Col)


def user_facing_api():
    data = TensorDataset(torch.arange(6))
    done = _run(
        IMPORTS
        + WRITE_YOUR_OWN
        + "shard_config = ShardConfig(tensor_parallel_size=2)\npolicy = MyPolicy()"
        + USER_FACING,
        model=_model(),
        dataset=data,
    )
    assert [int(batch[0]) for batch in done.dataloader] == list(range(6))
    assert done.shard_former.pg_manager is not None
    assert_close(_model()(_x()), done.model(_x()), "output")


WITHOUT_BOOSTER = """
if dist.get_world_size() > 1:
    tp_group = dist.new_group(backend="nccl")

    # First create configuration for Shardformer
    shard_config = ShardConfig(
        tensor_parallel_process_group=tp_group,
        enable_tensor_parallelism=True,
        enable_all_optimization=True
    )

    # Then create ShardFormer object with created config
    shard_former = ShardFormer(shard_config=shard_config)

    # Finally shard the model using ShardFormer.optimize method
    model, _ = shard_former.optimize(model)
"""


def without_the_booster():
    native = _model()

    # `optimize(model)` looks for a pack; here a policy is put into the place of what is installed.
    class WithPolicy(compat.ShardFormer):
        def optimize(self, model, policy=_run(WRITE_YOUR_OWN).MyPolicy):  # noqa: B008
            return super().optimize(model, policy)

    done = _run(WITHOUT_BOOSTER, dist=dist, model=native, ShardFormer=WithPolicy)
    assert done._ == []
    assert done.model is native
    assert_close(_model()(_x()), native(_x()), "output")


REPLACE_MODULE = """
# replace module
my_linear = Linear1D_Col.from_native_module(my_linear, process_group)
"""


def replace_a_module():
    torch.manual_seed(0)
    native = nn.Linear(8, 12).to(torch.float64)
    wanted = native(_x())
    done = _run(REPLACE_MODULE, my_linear=native, process_group=dist.group.WORLD)
    half = dist.get_rank() * 6
    assert_close(wanted[:, half : half + 6], done.my_linear(_x()), "output")


REPLACE_PARAMETERS = """
def shard_rowwise(weight, process_group):
    return weight.chunk(process_group.size())[process_group.rank()].clone()

def example_replace_weight(module: torch.nn.Module, process_group):
    weight = module.weight
    new_weight = shard_rowwise(weight, process_group)
    module.weight = torch.nn.Parameter(new_weight)

class ByHand(Policy):
    def preprocess(self) -> torch.nn.Module:
        self.model.seen = ["preprocess"]
        return self.model

    def module_policy(self):
        return {"Linear": ModulePolicyDescription(
            attribute_replacement={"out_features": 6},
            param_replacement=[example_replace_weight],
            sub_module_replacement=[],
        )}

    def new_model_class(self):
        class Net_(type(self.model)):
            def forward(self, x):
                return super().forward(x) * 1
        return Net_

    def postprocess(self) -> torch.nn.Module:
        self.model.seen.append("postprocess")
        return self.model

sharder = ModelSharder(model, ShardConfig(tensor_parallel_size=2), ByHand)
sharder.shard()
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 12, bias=False)

    def forward(self, x):
        return self.linear(x)


def four_stages():
    torch.manual_seed(0)
    model = Net().to(torch.float64)
    weight = model.linear.weight.detach().clone()
    _run(REPLACE_PARAMETERS, model=model)
    assert model.seen == ["preprocess", "postprocess"]
    assert type(model).__name__ in ("Net", "Net_")
    assert isinstance(model.linear.weight, DTensor)
    assert torch.equal(model.linear.weight.full_tensor(), weight)


@pytest.mark.parametrize(
    "snippet",
    [customized_policy, user_facing_api, without_the_booster, replace_a_module, four_stages],
    ids=lambda function: function.__name__,
)
def test_snippets_of_shardformer(pool, snippet):
    pool.run(snippet, world=2, process_group=snippet is not customized_policy)


class DemoModel(nn.Module):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            return self.out(self.q(x) * self.k(x) + self.v(x))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    def __init__(self):
        super().__init__()
        self.attn = self.Attention()
        self.layer_norm = nn.LayerNorm(8)
        self.mlp = self.Mlp()

    def forward(self, x):
        return self.mlp(self.layer_norm(self.attn(x)))


def rfc():
    torch.manual_seed(0)
    model = DemoModel().to(torch.float64)
    wanted = model(_x())
    blocks = _blocks()
    done = _run(blocks["The RFC's customized module, by a policy"], customized_model=model)
    assert_close(wanted, done.customized_model(_x()), "output")


def test_the_equivalents_of_the_rfcs_examples(pool):
    pool.run(rfc, world=2)


def _blocks():
    """Return the snippets of the page by the line before each."""
    found = re.findall(r"([^\n]+)\n\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return {line.rstrip(":"): code for line, code in found}


def page_snippets():
    blocks = _blocks()
    own = next(code for code in blocks.values() if "class MyPolicy" in code)
    done = _run(blocks["The snippet without the `Booster`"].rsplit("\n", 2)[0], dist=dist)
    model = _model()
    _run(own, model=model, shard_former=done.shard_former)
    assert_close(_model()(_x()), model(_x()), "output")


def test_the_pages_own_snippets(pool):
    pool.run(page_snippets, world=2)


def engine_snippet():
    """The snippets for the engine, on two stages: fp16, micro-batches of one row."""
    code = _blocks()["The snippets of its page with the `Booster`"]
    reference, model = (build(layers=4, dtype=torch.float32) for _ in range(2))
    data = {"ids": batch(0, 4, 6), "labels": batch(1, 4, 6)}
    optimizer = torch.optim.AdamW(model.parameters())
    done = _run(
        code,
        HybridParallelPlugin=functools.partial(compat.HybridParallelPlugin, custom_policy=TinyPolicy),
        Booster=compat.Booster,
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        output_transform_fn=lambda outputs: outputs,
        criterion=lambda outputs: outputs,
        train_dataloader=[data],
    )
    assert done.model is model
    wanted = reference(**data).detach()
    assert abs(float(done.outputs["loss"] / wanted) - 1) < 0.01
    assert (done.outputs["outputs"] is None) == (dist.get_rank() == 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


@PIPELINES
def test_the_snippets_of_the_engine(pool):
    pool.run(engine_snippet, world=2)


@pytest.mark.parametrize("name", compat.__all__)
def test_every_alias_is_there_and_listed(name):
    assert getattr(compat, name) is not None
    assert f"`{name}" in DOCS.read_text()


@pytest.mark.parametrize("name", sorted(compat._OTHERWISE))
def test_names_that_are_not_there_say_what_to_use(name):
    with pytest.raises(NotSupportedError) as caught:
        getattr(compat, name)
    assert str(caught.value) == f"{name} is not in shardcore {shardcore.__version__}: {compat._OTHERWISE[name]}."
    assert re.search(rf"^\| (`\w+`, )*`{name}`(, `\w+`)* \| no \|", DOCS.read_text(), re.M)
    with pytest.raises(ImportError):
        from shardcore_shardformer import NoSuchName  # noqa: F401
