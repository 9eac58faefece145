"""Models quantized to 4 bits: a rank computes with its part of the packed weights what the whole model computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_testing.parity import whole

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="adapters are those of peft, which is not installed")
pytest.importorskip("bitsandbytes", reason="weights are packed by bitsandbytes, which is not installed")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import bitsandbytes
import peft
import transformers
from bitsandbytes.functional import dequantize_4bit
from four_bits import packed

import shardcore_peft
from adapters import SP, adapted, base, batch, equal_training, lora  # from support/
from shardcore_quantized import Weight4Bit

#: Whose parts on two ranks are whole blocks of 64 values.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
DATA = {"tp": 1, "dp": 2}
INNER = "base_model.model.model.layers.0.mlp.down_proj.base_layer"


def quantized(model: Any) -> Any:
    """Quantize the linears of the blocks of ``model``, in place."""
    for path, module in [*model.model.layers.named_modules()]:
        if type(module) is nn.Linear:
            linear = packed(module.weight)
            linear.bias = module.bias
            linear.compute_type_is_set = True  # to none: an input in float64 is not the kernels'
            model.model.layers.set_submodule(path, linear)
    model.is_loaded_in_4bit = True  # which PEFT goes by
    return model


def read(model: Any) -> Any:
    """Return a plain model that has the values of a quantized one."""
    plain = base(**SIZES)
    plain.load_state_dict(
        {
            **{name: value for name, value in model.state_dict().items() if name in plain.state_dict()},
            **{
                f"{path}.weight": dequantize_4bit(module.weight.data, module.weight.quant_state).double()
                for path, module in model.named_modules()
                if isinstance(module, bitsandbytes.nn.Linear4bit)
            },
        }
    )
    return plain


def trains(options: dict[str, Any], attached: str) -> None:
    plain = quantized(base(**SIZES))
    reference = adapted(read(plain), lora())
    values = {name: value for name, value in reference.state_dict().items() if "lora_" in name}
    if attached == "before":
        model = peft.get_peft_model(plain, lora()).double()
        model.load_state_dict(values, strict=False)
        model = shardcore.shard(model, **options)
    else:
        model = shardcore_peft.get_peft_model(shardcore.shard(plain, **options), lora()).double()
        model.load_state_dict(values, strict=False)
    held = [local_tensor(p) for name, p in model.named_parameters() if "layers.0" in name and "lora_" not in name]
    assert sum(isinstance(one, Weight4Bit) for one in held) == 7
    inputs = batch("llama", "causal_lm", reference.get_base_model())
    equal_training(model, reference, inputs, replica=dist.get_rank() // options["tp"], replicas=options.get("dp", 1))


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    ("options", "attached"),
    [
        ({"tp": 2}, "before"),
        pytest.param({"tp": 2}, "after", marks=pytest.mark.nightly),
        ({"tp": 2, **SP}, "after"),
        pytest.param({"tp": 2, "parallel_output": True}, "before", marks=pytest.mark.nightly),
        (DATA, "before"),
        pytest.param({"tp": 2, "dp": 2}, "before", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_adapters_train_as_on_the_values_that_the_weights_have(pool, options, attached):
    pool.run(trains, options, attached, world=options["tp"] * options.get("dp", 1))


def steps(model: Any, ids: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Both:
    """transformers' own quantized model with PEFT's own adapters, and a sharded one, from one folder."""

    def __init__(self, folder: str, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype
        )
        self.folder, self.loading = folder, {"quantization_config": config, "dtype": dtype}
        cls = transformers.LlamaForCausalLM
        model = shardcore.from_pretrained(cls, folder, **self.loading, **options)
        torch.manual_seed(1)
        self.theirs = peft.get_peft_model(self.native(), lora(init_lora_weights=False)).train()
        torch.manual_seed(1)
        self.mine = shardcore_peft.get_peft_model(model, lora(init_lora_weights=False)).train()
        self.ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(0))
        self.near = 1e-5 if dtype == torch.float32 else 0.03

    def native(self) -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(self.folder, **self.loading)

    def compare(self, what: str, theirs: Any = None) -> Tensor:
        with torch.no_grad():
            got = whole(self.mine(input_ids=self.ids).logits).float()
            wanted = (theirs or self.theirs)(input_ids=self.ids).logits.float()
        apart = (got - wanted).norm() / wanted.norm()
        assert apart < self.near, (what, apart)
        return got


def as_upstream(folder: str, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    both = Both(folder, kind, dtype, options)
    mine, ids = both.mine, both.ids
    both.compare("before a step")
    assert steps(mine, ids) == pytest.approx(steps(both.theirs, ids), rel=both.near)
    out = Path(folder, "adapter")
    mine.save_pretrained(out)
    anew = peft.PeftModel.from_pretrained(both.native(), out).train()
    got = both.compare("loaded by PEFT", anew)
    if dtype == torch.float32:
        asked = {"attention_mask": torch.ones(2, 4).long(), "max_new_tokens": 4, "do_sample": False}
        assert mine.generate(ids[:, :4], **asked).equal(anew.generate(ids[:, :4], **asked))
    # What is frozen comes from where it came from, not from the checkpoint of a training.
    saved = shardcore.save_checkpoint(Path(folder, "training"), mine)
    names = {name for name, p in mine.named_parameters() if isinstance(local_tensor(p), Weight4Bit)}
    assert len(names) == 14
    entries = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert not {name for name in entries if name.removeprefix("model.") in names}
    with torch.no_grad():
        for parameter in mine.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    shardcore.load_checkpoint(saved, mine)
    assert both.compare("resumed", anew).equal(got)


def merged(folder: str, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    both = Both(folder, kind, dtype, options)
    # PEFT 0.18 rounds what it draws beside such weights to the type they compute in: another code for some sums.
    drawn = {name: value for name, value in both.theirs.state_dict().items() if "lora_" in name}
    both.mine.load_state_dict(drawn, strict=False)
    # What was merged cannot be taken out of values of 4 bits exactly: in 16 bits some come out a step apart.
    for work in ("merge_adapter", "unmerge_adapter")[: 2 if dtype == torch.float32 else 1]:
        getattr(both.mine, work)()
        with pytest.warns(UserWarning, match="rounding errors"):
            getattr(both.theirs, work)()
        both.compare(work)


def from_packed_files(folder: str, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    both = Both(folder, kind, dtype, options)
    place = str(Path(folder, "packed"))
    if dist.get_rank() == 0:
        both.native().save_pretrained(place)
    dist.barrier()
    cls = transformers.LlamaForCausalLM
    with pytest.raises(ConfigError, match="quantized by bitsandbytes already"):
        shardcore.from_pretrained(cls, place, **options)
    model = shardcore.shard(cls.from_pretrained(place, device_map="cpu", dtype=dtype), **options).train()
    with torch.no_grad():
        got, wanted = whole(model(input_ids=both.ids).logits), both.native().train()(input_ids=both.ids).logits
    assert (got - wanted).float().norm() < both.near * wanted.float().norm()


@pytest.fixture
def checkpoint(tmp_path):
    base(**SIZES).float().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("nf4", torch.float32, {"tp": 2}),
        pytest.param("fp4", torch.bfloat16, {"tp": 2, **SP}, marks=pytest.mark.nightly),
        pytest.param("nf4", torch.float32, DATA, marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "work",
    [as_upstream, merged, pytest.param(from_packed_files, marks=pytest.mark.nightly)],
    ids=lambda work: work.__name__,
)
def test_a_fine_tuning_is_that_of_transformers_and_peft(pool, checkpoint, work, kind, dtype, options):
    pool.run(work, checkpoint, kind, dtype, options, world=2)


def trained(folder: str) -> None:
    """By the Trainer, and compiled."""
    from shardcore_trainer import Trainer

    both = Both(folder, "nf4", torch.float32, {"tp": 2})
    rows = both.ids[:1].repeat(2, 1)
    wanted = steps(both.theirs, rows)
    arguments = transformers.TrainingArguments(
        str(Path(folder, "trained")),
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    # transformers 4 counts the first label, for which nothing is predicted.
    row = {"input_ids": rows[0], "labels": torch.cat([torch.tensor([-100]), rows[0, 1:]])}
    trainer = Trainer(model=both.mine, args=arguments, train_dataset=[row] * 6)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(wanted, abs=1e-4)
    both.compare("trained")
    with pytest.raises(NotSupportedError, match=r"assignment to \.data"):
        both.mine.get_submodule(INNER).weight.data = torch.zeros(128, 256)
    eager = both.mine(input_ids=rows, labels=rows).loss
    compiled = torch.compile(both.mine, backend="aot_eager")(input_ids=rows, labels=rows).loss
    compiled.backward()
    assert compiled.item() == pytest.approx(eager.item(), rel=1e-6)


def by_trl(folder: str, given: bool) -> None:
    """Adapters are in bfloat16, as TRL has them for QLoRA, whether they come before or by ``peft_config``."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    from shardcore_trainer import sharded

    letters = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate("_abcdefghij")}, unk_token="_"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="a", pad_token="_")
    both = Both(folder, "nf4", torch.bfloat16, {"tp": 2})
    model = both.mine if given else both.mine.unload()
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    trainer = sharded(trl.SFTTrainer)(
        model=model,
        args=trl.SFTConfig(folder, **settings, report_to=[], bf16=True, use_cpu=True, save_strategy="no", max_length=8),
        train_dataset=datasets.Dataset.from_dict({"text": ["abcdefgh"] * 8}),
        processing_class=tokenizer,
        peft_config=None if given else lora(),
    )
    held = dict(trainer.model.named_parameters())
    assert {p.dtype for name, p in held.items() if "lora_" in name} == {torch.bfloat16}
    assert sum(isinstance(local_tensor(p), Weight4Bit) for p in held.values()) == 14
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[1] < losses[0]


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # the trainers'
@pytest.mark.parametrize("given", [True, False])
def test_sft_takes_such_a_model(pool, checkpoint, given):
    for library in ("accelerate", "datasets", "trl"):
        pytest.importorskip(library)
    pool.run(by_trl, checkpoint, given, world=2)


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # Dynamo's and the Trainer's
def test_the_trainer_and_the_compiler_take_such_a_model(pool, checkpoint):
    pytest.importorskip("accelerate")
    pool.run(trained, checkpoint, world=2)


def _refusals() -> None:
    narrow = quantized(base(**{**SIZES, "hidden_size": 64}))
    before = {path: type(module) for path, module in narrow.named_modules()}
    with pytest.raises(NotSupportedError, match=r"o_proj.*blocks of 64 values along its rows"):
        shardcore.shard(narrow, tp=2)
    assert {path: type(module) for path, module in narrow.named_modules()} == before
    assert isinstance(narrow.model.layers[0].mlp.up_proj.weight, bitsandbytes.nn.Params4bit)
    eight = base(**SIZES)
    eight.model.layers[1].mlp.up_proj = bitsandbytes.nn.Linear8bitLt(128, 256, bias=False)
    with pytest.raises(NotSupportedError, match=r"up_proj is a .*Linear8bitLt.*load_in_4bit=True"):
        shardcore.shard(eight, tp=2)
    model = shardcore.shard(quantized(base(**SIZES)), tp=2)
    with pytest.raises(NotSupportedError, match="a weight of 4 bits"):
        model.model.layers[0].mlp.up_proj.weight.data.mul_(2)


def test_what_cannot_be_cut_is_refused_and_nothing_is_changed(pool):
    pool.run(_refusals, world=2)


def from_one_rank() -> None:
    model = base(**SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + dist.get_rank())
    plain = quantized(model)
    reference, inputs = read(plain), batch("llama", "causal_lm", plain)(0, 0)
    sharded = shardcore.shard(plain, tp=2, sync_from=0)
    got, wanted = whole(sharded(**inputs).logits), reference(**inputs).logits
    assert (got - wanted).abs().max() < 1e-12 or dist.get_rank()


@pytest.mark.usefixtures("float64_throughout")
def test_packed_weights_are_sent_as_they_are(pool):
    pool.run(from_one_rank, world=2)
