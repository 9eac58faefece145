"""Models that torchao has quantized: a rank computes with its part of the weights what the whole model computes."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_testing.parity import whole

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")
pytest.importorskip("torchao", reason="weights are quantized by torchao, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import peft
import torchao.quantization as ao
import transformers

import shardcore_peft
from adapters import LINEARS, SP, adapted, base, batch, equal_training, lora  # from support/
from shardcore_quantized import WeightTorchao

KINDS = {
    "int8 rows": ao.Int8WeightOnlyConfig(),
    "int8 groups": ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)),
    "int4 groups": ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
    "float8 rows": ao.Float8WeightOnlyConfig(),
}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
DATA = {"tp": 1, "dp": 2}


def quantized(model: Any, kind: str) -> Any:
    """Quantize the linears of the blocks of ``model``, in place."""
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.float()
            ao.quantize_(module, KINDS[kind])
            if module.bias is not None:
                module.bias.data = module.bias.data.double()
    return model


def read(model: Any) -> Any:
    """Return a plain model that has the values of a quantized one."""
    plain = base(**SIZES)
    values = {n: v.dequantize() if isinstance(v, ao.Int8Tensor | ao.IntxUnpackedToInt8Tensor | ao.Float8Tensor) else v
              for n, v in model.state_dict().items()}  # fmt: skip
    plain.load_state_dict({name: value.double() for name, value in values.items()})
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_products_are_those_of_the_whole(kind):
    linear = nn.Linear(128, 64, bias=False)
    ao.quantize_(linear, KINDS[kind])
    own, values, x = WeightTorchao.of("weight", linear.weight), linear.weight.dequantize(), torch.randn(2, 3, 128)
    assert nn.functional.linear(x, own).equal(linear(x))
    for part, wanted in [
        (own[8:24], values[8:24]),
        (own[:, 64:], values[:, 64:]),
        (own.narrow(1, 32, 64).clone(), values[:, 32:96]),
        (torch.cat([own[32:], own[:32]]), torch.cat([values[32:], values[:32]])),
        (own[:, :64][4:8].to(torch.float64), values[4:8, :64].double()),
        (copy.deepcopy(own), values),
    ]:
        assert isinstance(part, WeightTorchao)
        assert part.dequantize().equal(wanted)
        assert (part.shape, part.dtype) == (wanted.shape, wanted.dtype)
    with pytest.raises(NotSupportedError, match="would write into a weight that torchao has quantized"):
        own.copy_(values)
    with pytest.raises(NotSupportedError, match="would write into a weight that torchao has quantized"):
        own.zero_()
    if "groups" in kind:
        with pytest.raises(NotSupportedError, match=r"1 x 32 values; columns 0 to 40 begin .*multiples of 32"):
            own[:, :40]


def attach(model: Any, by: Callable[..., Any]) -> Any:
    """Return ``model`` with adapters; PEFT warns that nothing tells it how a weight is quantized after a merge."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
        model = by(model, lora())
    for name, module in model.named_modules():
        if name.endswith(("lora_A", "lora_B")):
            module.double()
    return model


def trains(kind: str, options: dict[str, Any], attached: str) -> None:
    plain = quantized(base(**SIZES), kind)
    reference = adapted(read(plain), lora())
    values = {name: value for name, value in reference.state_dict().items() if "lora_" in name}
    if attached == "before":
        model = attach(plain, adapted)
        model.load_state_dict(values, strict=False)
        shardcore.shard(model, **options)
    else:
        model = attach(shardcore.shard(plain, **options), shardcore_peft.get_peft_model)
        model.load_state_dict(values, strict=False)
    held = [local_tensor(p) for name, p in model.named_parameters() if "layers.0" in name and "lora_" not in name]
    assert sum(isinstance(one, WeightTorchao) for one in held) == len(LINEARS)
    inputs = batch("llama", "causal_lm", reference.get_base_model())
    equal_training(model, reference, inputs, replica=dist.get_rank() // options["tp"], replicas=options.get("dp", 1))
    with pytest.raises(NotSupportedError, match=r"adapters are not merged into .*: save them"):
        model.merge_adapter()
    assert not any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("kind", "options", "attached"),
    [
        ("int8 rows", {"tp": 2}, "before"),
        ("int8 groups", {"tp": 2, **SP}, "after"),
        ("int4 groups", {"tp": 2}, "after"),
        ("float8 rows", {"tp": 2, "parallel_output": True}, "before"),
        ("int8 rows", DATA, "before"),
        ("int4 groups", {"tp": 2, "dp": 2}, "before"),
    ],
    ids=str,
)
def test_adapters_train_as_on_the_values_that_the_weights_have(pool, kind, options, attached):
    pool.run(trains, kind, options, attached, world=options["tp"] * options.get("dp", 1))


def as_upstream(folder: str, kind: str) -> None:
    """transformers' own quantized model with PEFT's own adapters, and a sharded one, from one folder."""
    config = transformers.TorchAoConfig(KINDS[kind])
    cls = transformers.LlamaForCausalLM

    def native() -> Any:
        return cls.from_pretrained(folder, quantization_config=config, dtype=torch.float32)

    with pytest.raises(ConfigError, match="TorchAoConfig"):
        shardcore.from_pretrained(cls, folder, quantization_config=config, tp=2)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(native(), lora(init_lora_weights=False))
    torch.manual_seed(1)
    mine = shardcore.shard(peft.get_peft_model(native(), lora(init_lora_weights=False)), tp=2)
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(0))
    losses: list[list[float]] = [[], []]
    for model, seen in zip((theirs, mine), losses, strict=True):
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    place = Path(folder, "adapter")
    mine.save_pretrained(place)
    anew = peft.PeftModel.from_pretrained(native(), place)
    with torch.no_grad():
        got, wanted = whole(mine(input_ids=ids).logits).float(), anew(input_ids=ids).logits.float()
    assert (got - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("kind", ["int8 rows", "float8 rows"])
def test_a_fine_tuning_is_that_of_transformers_and_peft(pool, tmp_path, kind):
    base(**SIZES).float().save_pretrained(tmp_path)
    pool.run(as_upstream, str(tmp_path), kind, world=2)


def _refusals() -> None:
    model = base(**SIZES).float()
    narrow = quantized(base(**{**SIZES, "hidden_size": 96, "num_attention_heads": 4}), "int8 groups")
    before = narrow.model.layers[0].self_attn.o_proj.weight
    with pytest.raises(
        NotSupportedError, match=r"o_proj.*in blocks of 1 x 32 values, and the part of rank 0 of 2, 96 x 48"
    ):
        shardcore.shard(narrow, tp=2)
    assert narrow.model.layers[0].self_attn.o_proj.weight is before
    dynamic = copy.deepcopy(model)
    ao.quantize_(dynamic.model.layers[0].mlp, ao.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(NotSupportedError, match="quantizes its input too"):
        shardcore.shard(dynamic, tp=2)
    table = copy.deepcopy(model)
    ao.quantize_(table, KINDS["int4 groups"], filter_fn=lambda module, path: isinstance(module, nn.Embedding))
    with pytest.raises(NotSupportedError, match=r"embed_tokens.weight of a Embedding was quantized by torchao"):
        shardcore.shard(table, tp=2)


def test_what_cannot_be_cut_is_refused_and_nothing_is_changed(pool):
    pool.run(_refusals, world=2)
