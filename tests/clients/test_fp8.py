"""Checkpoints in FP8 that stay so: a rank computes with its part of the weights what the whole model computes.

transformers has no kernel for them on a CPU, where it loads a plain model of their values. That is what is compared
with; and what it loads on a card is loaded here, where it thinks that it has one.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_testing.parity import whole

pytest.importorskip("transformers", minversion="5.24", reason="adapters train on FP8 in newer releases alone")
pytest.importorskip("accelerate", reason="transformers loads FP8 with accelerate, which is not installed")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import peft
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8 as finegrained
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import shardcore_peft
from adapters import LINEARS, SP, base, batch, equal_training, lora, shaken  # from support/
from shardcore_quantized import WeightFP8

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
DATA = {"tp": 1, "dp": 2}


def checkpoint(folder: Path, blocks: tuple[int, int] = (32, 32), scale_fmt: str = "float", **sizes: Any) -> str:
    """Write a Llama in FP8, as DeepSeek's and Qwen's files are, and return where."""
    base(**{**SIZES, **sizes}).float().save_pretrained(folder)
    config = transformers.FineGrainedFP8Config(weight_block_size=blocks, scale_fmt=scale_fmt)
    quantize = finegrained.Fp8Quantize(FineGrainedFP8HfQuantizer(config, pre_quantized=True))
    state: dict[str, Any] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        state |= quantize.convert({name: value}) if name.split(".")[-2] in LINEARS else {name: value}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = config.to_dict()
    (folder / "config.json").write_text(json.dumps(said))
    return str(folder)


def kept(folder: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the model as transformers loads it where there is a card."""
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")


def read(folder: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the plain model of the values, as transformers loads it where there is none."""
    config = transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def linear(kind: str, rows: int, columns: int) -> Any:
    made = finegrained.FP8Linear(columns, rows, (32, 32), scale_fmt=kind)
    made.weight.data = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    made.weight_scale_inv.data = (torch.rand(made.weight_scale_inv.shape) + 0.1).to(made.weight_scale_inv.dtype)
    return made


@pytest.mark.parametrize("kind", ["float", "ue8m0"])
def test_parts_and_products_are_those_of_the_whole(kind):
    made = linear(kind, 80, 128)
    own, x = WeightFP8.of("linear", made, torch.float32), torch.randn(2, 3, 128)
    values = finegrained._dequantize_fp8_weight(made.weight, made.weight_scale_inv, [32, 32], torch.float32).detach()
    assert nn.functional.linear(x, own).equal(nn.functional.linear(x, values))
    for part, wanted in [
        (own[32:64], values[32:64]),
        (own[32:], values[32:]),  # the last block has half of its rows
        (own[:, 64:], values[:, 64:]),
        (own.narrow(1, 32, 64).clone(), values[:, 32:96]),
        (torch.cat([own[32:64], own[:32]]), torch.cat([values[32:64], values[:32]])),
        (own[:, :64][32:64].to(torch.float64), values[32:64, :64].double()),
        (copy.deepcopy(own), values),
    ]:
        assert isinstance(part, WeightFP8)
        assert part.dequantize().equal(wanted)
        assert (part.shape, part.dtype) == (wanted.shape, wanted.dtype)
    assert torch.cat([own, own]).equal(torch.cat([values, values]))  # by values: a block would begin inside of one
    with pytest.raises(NotSupportedError, match="would write into a weight of an FP8 checkpoint"):
        own.copy_(values)
    with pytest.raises(NotSupportedError, match=r"32 x 32 values; columns 0 to 40 begin .*multiples of 32"):
        own[:, :40]


def test_on_a_card_the_kernel_is_that_of_transformers(monkeypatch):
    made, seen = linear("float", 64, 128), []

    def kernel(x: Any, weight: Any, scale: Any, block: Any, bias: Any, *rest: Any) -> Any:
        seen.append((weight.dtype, [*block], *rest))
        return nn.functional.linear(x, finegrained._dequantize_fp8_weight(weight, scale, block, x.dtype), bias)

    monkeypatch.setattr(finegrained, "fp8_linear", kernel)
    x = torch.randn(3, 128)
    wanted = made(x)
    own = WeightFP8.of("linear", made, torch.float32)
    assert own.by_kernel(x, None).equal(wanted)
    assert seen[0] == seen[1]


def trains(folder: str, options: dict[str, Any], attached: str) -> None:
    reference = shaken(of_double(peft.get_peft_model(read(folder), lora())))
    values = {name: value for name, value in reference.state_dict().items() if "lora_" in name}
    model = kept(folder)
    if attached == "before":
        model = of_double(peft.get_peft_model(model, lora()))
        model.load_state_dict(values, strict=False)
        model = shardcore.shard(model, **options)
    else:
        model = of_double(shardcore_peft.get_peft_model(shardcore.shard(model, **options), lora()))
        model.load_state_dict(values, strict=False)
    held = [local_tensor(p) for name, p in model.named_parameters() if "layers.0" in name and "lora_" not in name]
    packed = [one for one in held if isinstance(one, WeightFP8)]
    assert len(packed) == len(LINEARS)
    assert all(one.qdata.is_contiguous() and one.qdata.dtype == torch.float8_e4m3fn for one in packed)
    inputs = batch("llama", "causal_lm", reference.get_base_model())
    equal_training(model, reference, inputs, replica=dist.get_rank() // options["tp"], replicas=options.get("dp", 1))
    with pytest.raises(NotSupportedError, match=r"adapters are not merged into .*dequantize=True"):
        model.merge_adapter()
    assert not any(getattr(module, "merged", False) for module in model.modules())


def of_double(model: Any) -> Any:
    for name, module in model.named_modules():
        if name.endswith(("lora_A", "lora_B")):
            module.double()
    return model


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("form", "options", "attached"),
    [
        ("float", {"tp": 2}, "before"),
        ("ue8m0", {"tp": 2, **SP}, "after"),
        ("float", {"tp": 2, "parallel_output": True}, "after"),
        ("float", DATA, "before"),
        ("float", {"tp": 2, "dp": 2}, "before"),
    ],
    ids=str,
)
def test_adapters_train_as_on_the_values_that_the_weights_have(pool, tmp_path, form, options, attached):
    folder = checkpoint(tmp_path, scale_fmt=form)
    pool.run(trains, folder, options, attached, world=options["tp"] * options.get("dp", 1))


def as_upstream(folder: str) -> None:
    """From one rank, and saved: PEFT loads the adapter, and merges it into the values."""
    torch.manual_seed(dist.get_rank())
    config = lora(init_lora_weights=False)
    model = shardcore.shard(peft.get_peft_model(kept(folder, torch.float32), config), tp=2, sync_from=0)
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    place = Path(folder, "adapter")
    model.save_pretrained(place)
    anew = peft.PeftModel.from_pretrained(read(folder, torch.float32), place)
    with torch.no_grad():
        got, wanted = whole(model(input_ids=ids).logits), anew(input_ids=ids).logits
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
        merged = anew.merge_and_unload()(input_ids=ids).logits
    assert (got - merged).norm() < 1e-5 * merged.norm()


def test_an_adapter_is_saved_as_peft_reads_it(pool, tmp_path):
    pool.run(as_upstream, checkpoint(tmp_path), world=2)


def _refusals(folder: str, narrow: str) -> None:
    model = kept(narrow)
    before, scale = model.model.layers[0].self_attn.o_proj, model.model.layers[0].self_attn.o_proj.weight_scale_inv
    for given in (lambda: model, lambda: peft.get_peft_model(model, lora())):
        with pytest.raises(
            NotSupportedError, match=r"q_proj.*in blocks of 32 x 32 values, and the part of rank 0 of 2, 48 x 96"
        ):
            shardcore.shard(given(), tp=2)
        assert type(before) is finegrained.FP8Linear
        assert before.weight_scale_inv is scale
        assert before.weight.dtype == torch.float8_e4m3fn
    with pytest.raises(NotSupportedError, match=r"weight is torch.float64.*cannot be converted"):
        shardcore.shard(kept(folder).double(), tp=2)
    model = kept(folder)
    model.model.layers[0].mlp.experts = finegrained.FP8Embedding(4, 32)
    with pytest.raises(NotSupportedError, match=r"experts is a FP8Embedding, which cannot be divided"):
        shardcore.shard(model, tp=2)
    model = kept(folder)
    model.model.layers[0].mlp.up_proj.activation_scheme = "static"
    with pytest.raises(NotSupportedError, match=r"up_proj .* by a static scale"):
        shardcore.shard(model, tp=2)
    with (
        mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"),
        pytest.raises((NotSupportedError, ConfigError), match=r"of an FP8 checkpoint.*give it to shard"),
    ):
        shardcore.from_pretrained(transformers.LlamaForCausalLM, folder, tp=2)


def test_what_cannot_be_cut_is_refused_and_nothing_is_changed(pool, tmp_path):
    narrow = checkpoint(tmp_path / "narrow", hidden_size=96, num_key_value_heads=4)
    pool.run(_refusals, checkpoint(tmp_path / "wide"), narrow, world=2)
