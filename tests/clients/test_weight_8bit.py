"""Models of LLM.int8(): a rank computes with its part of the weights what the whole model computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import NotSupportedError
from shardcore_testing.parity import whole

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")
pytest.importorskip("bitsandbytes", reason="weights are quantized by bitsandbytes, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import bitsandbytes
import peft

import shardcore_peft
from adapters import LINEARS, SP, adapted, base, batch, equal_training, lora  # from support/
from shardcore_quantized import Weight8Bit

DATA = {"tp": 1, "dp": 2}
NEAR = 1e-3  # of outputs in float32; with the largest values of parts of rows they are 3e-2 apart


def quantized(model: Any) -> Any:
    """Quantize the linears of the blocks of ``model``, in place, as transformers does for ``load_in_8bit``."""
    for path, module in [*model.model.layers.named_modules()]:
        if type(module) is nn.Linear:
            linear = bitsandbytes.nn.Linear8bitLt(
                module.in_features, module.out_features, False, has_fp16_weights=False, threshold=6.0
            )
            single = module.weight.detach().to(torch.float32, copy=True)
            linear.weight = bitsandbytes.nn.Int8Params(single, requires_grad=False).to("cpu")
            model.model.layers.set_submodule(path, linear)
    model.is_loaded_in_8bit = True  # which PEFT goes by
    return model


def trains(options: dict[str, Any], attached: str) -> None:
    reference = adapted(quantized(base()), lora()).double()
    values = {name: value for name, value in reference.state_dict().items() if "lora_" in name}
    model = quantized(base())
    if attached == "before":
        model = peft.get_peft_model(model, lora()).double()
        model.load_state_dict(values, strict=False)
        model = shardcore.shard(model, **options)
    else:
        model = shardcore_peft.get_peft_model(shardcore.shard(model, **options), lora()).double()
        model.load_state_dict(values, strict=False)
    held = [local_tensor(p) for name, p in model.named_parameters() if "layers.0" in name and "lora_" not in name]
    assert sum(isinstance(one, Weight8Bit) for one in held) == len(LINEARS)
    compared = Compared(reference)
    inputs = batch("llama", "causal_lm", reference.get_base_model())
    equal_training(model, compared, inputs, replica=dist.get_rank() // options["tp"], replicas=options.get("dp", 1))
    with pytest.raises(NotSupportedError, match=r"adapters are not merged into .*a weight of 8 bits"):
        model.merge_adapter()


class Compared:
    """A quantized model whose frozen weights of 8 bits are told by their values, not by numbers without a scale."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def parameters(self) -> Any:
        return self.model.parameters()

    def named_parameters(self) -> Any:
        return [(name, p) for name, p in self.model.named_parameters() if p.dtype != torch.int8]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("options", "attached"),
    [({"tp": 2}, "before"), ({"tp": 2, **SP}, "after"), (DATA, "before"), ({"tp": 2, "dp": 2}, "before")],
    ids=str,
)
def test_adapters_train_as_on_the_unsharded_model(pool, options, attached):
    pool.run(trains, options, attached, world=options["tp"] * options.get("dp", 1))


def with_outliers() -> Any:
    """Return a model some of whose inputs are outliers, of linears that are split either way."""
    torch.manual_seed(0)
    model = base().float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] *= 9
            layer.mlp.up_proj.weight[5] *= 40
    return quantized(model).eval()


def generates(options: dict[str, Any]) -> None:
    """Outside of training inputs are quantized too, by whole rows and without their outliers."""
    reference = with_outliers()
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(0))
    found: dict[str, int] = {}
    for name, module in reference.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.register_forward_hook(
                lambda module, *rest, name=name: found.update({name: len(module.state.idx)})  # columns
            )
    with torch.no_grad():
        wanted = reference(input_ids=ids).logits
    assert found["model.layers.0.self_attn.q_proj"]
    assert found["model.layers.0.mlp.down_proj"]
    model = shardcore.shard(with_outliers(), **options)
    with torch.no_grad():
        got = whole(model(input_ids=ids).logits)
    assert (got - wanted).norm() < NEAR * wanted.norm(), (got - wanted).norm() / wanted.norm()
    trained = whole(model.train()(input_ids=ids).logits.detach())
    assert (trained - got).norm() > 2 * NEAR * got.norm()  # by values, as bitsandbytes trains on a CPU


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, **SP}], ids=str)
def test_outliers_and_scales_are_those_of_whole_rows(pool, options):
    pool.run(generates, options, world=2)


def _refusals() -> None:
    with pytest.raises(
        NotSupportedError, match=r"a weight of 8 bits.*enable_sequence_overlap multiplies them in pieces"
    ):
        shardcore.shard(quantized(base()), tp=2, **SP, enable_sequence_overlap=True)


def test_products_of_pieces_are_refused(pool):
    pool.run(_refusals, world=2)
