"""Policies that are drafted from what a small model computes: exact as they are, or left whole with the reason."""

from __future__ import annotations

import datetime
import functools
import importlib
import logging
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError, NoPolicyError
from shardcore_testing import Case, Supports, WorkerPool, text_batch
from shardcore_testing.checks import examine
from shardcore_testing.findings import Finding
from shardcore_testing.subject import Subject

transformers = pytest.importorskip("transformers")

from shardcore_scaffold import infer, inferred, proof  # noqa: E402
from shardcore_scaffold.calls import like  # noqa: E402
from shardcore_scaffold.cases import Example, cases  # noqa: E402
from shardcore_scaffold.draft import source  # noqa: E402
from shardcore_scaffold.facts import Facts  # noqa: E402
from shardcore_scaffold.guess import guess  # noqa: E402
from shardcore_scaffold.infer import build, loss_of  # noqa: E402
from shardcore_scaffold.small import small_model  # noqa: E402

#: Classes that no pack of this project was written for, and some whose layouts are unusual, with the least share of
#: their parameters that a draft splits.
CLASSES = {
    "BioGptForCausalLM": 0.8,  # learned positions, biases everywhere
    "CohereForCausalLM": 0.9,  # parallel residual
    "DeepseekV3ForCausalLM": 0.8,  # latent attention, experts, experts that all tokens visit
    "FalconForCausalLM": 0.5,  # one key/value head that all share is left whole, and with it attention
    "GPTBigCodeForCausalLM": 0.7,
    "GraniteForCausalLM": 0.9,
    "LongT5ForConditionalGeneration": 0.27,  # attention within windows, a bias that the first block makes for all
    "MptForCausalLM": 0.9,  # ALiBi, fused by projection
    "Olmo2ForCausalLM": 0.9,  # norms over all heads
    "OlmoeForCausalLM": 0.9,  # the same, and experts
    "PersimmonForCausalLM": 0.9,  # fused by head, norms of heads
    "Qwen2MoeForCausalLM": 0.9,  # a shared expert with a gate
    "StableLmForCausalLM": 0.9,
    "Starcoder2ForCausalLM": 0.9,
    "ViTMSNForImageClassification": 0.5,
    "YosoForMaskedLM": 0.7,
}


#: Those whose attention is left whole, in all blocks or in some, so that tokens are mixed outside of the regions.
NO_SEQUENCE = {"FalconForCausalLM", "GPTBigCodeForCausalLM", "LongT5ForConditionalGeneration"}


#: Those of which nothing is gathered: attention is left whole, or returns weights of another shape.
NOT_CAPTURED = {*NO_SEQUENCE, "YosoForMaskedLM"}


def draft(name: str):
    small = small_model(getattr(transformers, name))
    return small, guess(Facts(small.model, lambda model: model(**small.inputs)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "OlmoeForCausalLM" else pytest.mark.nightly) for name in CLASSES]
)
def test_it_is_exact(pool: WorkerPool, tmp_path, monkeypatch, name: str) -> None:
    small, found = draft(name)
    module = f"drafted_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(source(type(small.model), found))
    monkeypatch.syspath_prepend(tmp_path)
    policy = getattr(importlib.import_module(module), f"{name}Policy")
    cls = type(small.model)
    config = cls.config_class().to_json_string(use_diff=False)
    case = Case(
        name=name,
        build=functools.partial(build, cls.__module__, name, config),
        inputs=functools.partial(like, small.inputs),
        loss=loss_of,
        policy=f"{module}:{name}Policy",
        # A step of AdamW makes ten times as much of what rounds otherwise; so much after scores that nothing scales.
        tolerance=1e-11 if name == "LongT5ForConditionalGeneration" else 1e-12,
        supports=Supports(sequence=found.sequence, captured=found.captured),
    )
    pool.run(_look_in, str(tmp_path), world=2)
    asked = {"training": True, "sequence": case.supports.sequence, "captured": bool(found.captured)}
    sections = [section for section, there in asked.items() if there]
    findings = [finding for section in sections for finding in examine(pool, Subject(case=case, tp=2), section)]
    assert case.supports.sequence == (name not in NO_SEQUENCE)
    assert bool(found.captured) == (name not in NOT_CAPTURED)
    assert [(f.check, f.message) for f in findings if f.state == "failed"] == []
    plan = compile_plan(policy(), small.model, ShardConfig.of(tp=2).resolve(2))
    sizes = {n: p.numel() for n, p in small.model.named_parameters()}
    split = sum(sizes[p.name] for p in plan.parameters if p.layout and not p.layout.placement.is_replicate())
    assert split / sum(sizes.values()) > CLASSES[name]


def _look_in(folder: str) -> None:
    import sys

    sys.path.insert(0, folder)


#: Heads whose labels, or whose configuration, are not those of a language model.
HEADS = (
    "ElectraForMultipleChoice",
    "ElectraForPreTraining",
    "ElectraForQuestionAnswering",
    "ElectraForTokenClassification",
    "Starcoder2ForSequenceClassification",
    "Starcoder2ForTokenClassification",
)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_called_with_what_it_learns_from(name: str) -> None:
    small = small_model(getattr(transformers, name))
    for inputs in (small.inputs, text_batch(small.model, 0)):
        assert torch.isfinite(small.model(**inputs)["loss"])
        if name.endswith("PreTraining"):
            assert set(inputs["labels"].unique().tolist()) == {0, 1}  # whether a token was replaced


def test_blocks_of_several_parts_are_what_a_list_holds() -> None:
    _, found = draft("SwitchTransformersForConditionalGeneration")
    assert found.lists == ["encoder.block", "decoder.block"]
    assert found.stages["blocks"] == found.lists


def test_blocks_in_which_nothing_is_split_can_be_cut_all_the_same() -> None:
    _, found = draft("MambaForCausalLM")
    assert not found.lists
    assert found.stages["blocks"] == ["backbone.layers"]


def test_a_model_may_keep_what_it_computed() -> None:
    small = small_model(transformers.StableLmForCausalLM)

    def keep(module: nn.Module, args: object, out: torch.Tensor) -> None:
        module.kept = out  # what autograd made cannot be copied

    small.model.lm_head.register_forward_hook(keep)
    found = guess(Facts(small.model, lambda model: model(**small.inputs)))
    assert found.regions == draft("StableLmForCausalLM")[1].regions


def test_what_cannot_be_split_is_said() -> None:
    _, found = draft("XLNetLMHeadModel")  # its attention multiplies by parameters of its own
    assert any("rel_attn is left whole" in doubt for doubt in found.doubts)
    assert "rel_attn" not in "".join(row for rows in found.rows.values() for row in rows if "region(" in row)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("CTRLLMHeadModel", "multi_head_attention.dense"),  # the same tensor as queries, keys and values
        ("LongcatFlashForCausalLM", "o_proj"),  # latent attention in a list of its own
        ("MobileBertModel", "attention.output.dense"),  # scores so large that one of them is all
        ("Pop2PianoForConditionalGeneration", "SelfAttention.o"),  # a bias in the first block alone
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("PvtModel", "attention.output.dense"),  # other keys in the last blocks
                ("Sapiens2Backbone", "attention.o_proj"),  # heads that share keys in some blocks
                ("KimiLinearForCausalLM", "o_proj"),  # two classes of attention, one of which is left whole
            )
        ),
    ],
)
def test_blocks_that_differ_are_split(name: str, row: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip("newer than this transformers")
    _, found = draft(name)
    assert row in {row for _, row in found.split}


@pytest.mark.skipif(not hasattr(transformers, "Ovis2ForConditionalGeneration"), reason="newer than this transformers")
def test_a_vocabulary_that_cannot_be_split_leaves_the_blocks_split() -> None:
    _, found = draft("Ovis2ForConditionalGeneration")  # its images are multiplied with the table of words
    assert any("the vocabulary is left whole. Split, it fails: " in doubt for doubt in found.doubts)
    assert {row for _, row in found.split} >= {"self_attn.o_proj", "mlp.down_proj"}


def test_what_lies_in_one_parameter_is_said() -> None:
    _, found = draft("Qwen3NextForCausalLM")  # a convolution over channels
    assert any("linear_attn.conv1d is left whole: several matrices in one" in doubt for doubt in found.doubts)
    assert found.split == {("Qwen3NextDecoderLayer", "self_attn.o_proj")}  # with the experts, which are no region


def test_experts_with_biases_are_split() -> None:
    _, found = draft("GptOssForCausalLM")
    assert 'experts(block="mlp", weights="experts", router="router"),' in found.rows["GptOssDecoderLayer"]
    assert found.doubts == []


def test_samples_that_are_dropped_are_dropped_on_all_ranks() -> None:
    _, found = draft("Dinov2Model")
    assert found.sequence
    assert 'shared_rng("drop_path"),' in found.rows["Dinov2Layer"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ConvBertForMaskedLM", "convbert.encoder.layer: tokens are mixed outside of the regions"),
        ("MambaForCausalLM", "there is no list of blocks"),
        ("PhimoeForCausalLM", "its blocks draw numbers"),  # a router samples
        ("XLNetLMHeadModel", "of 2 tokens were expected in its second dim"),  # rows come second
    ],
)
def test_why_tokens_cannot_be_split_is_said(name: str, words: str) -> None:
    _, found = draft(name)
    assert "sequence" not in found.words
    (said,) = (doubt for doubt in found.doubts if doubt.startswith("no sequence parallelism"))
    assert words in said


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("ElectraForMaskedLM", ["ElectraModel"]),  # the encoder runs the blocks, and the model captures
        ("MarianMTModel", ["MarianEncoder", "MarianDecoder"]),
    ],
)
def test_what_can_be_asked_for_is_gathered_where_it_is_captured(name: str, classes: list[str]) -> None:
    small, found = draft(name)
    gathering = {cls for cls, rows in found.rows.items() if any(row.startswith("outputs(") for row in rows)}
    assert gathering == set(classes)
    assert {"attentions", "hidden_states"} <= set(found.captured)
    text = cases("mine", Example(small.model, small.inputs, small.settings), found)
    assert f"captured={found.captured!r}".replace("'", '"') in text
    assert 'options={"attn_implementation": ("sdpa", "eager")}' in text


def test_what_is_gathered_by_no_rule_is_said() -> None:
    _, found = draft("YosoForMaskedLM")
    assert not found.captured
    assert any(doubt.startswith("captured attentions and hidden_states are refused") for doubt in found.doubts)


def test_a_region_of_one_linear_is_entered_where_that_lets_tokens_be_split() -> None:
    _, found = draft("GPTNeoXForCausalLM")
    rows = "".join(row for rows in found.rows.values() for row in rows)
    assert 'enter="attention"' in rows
    assert 'sequence(scatter="layers[0]", gather="final_layer_norm")' in rows


def test_a_draft_is_the_same_every_time() -> None:
    texts = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        small, found = draft("StableLmForCausalLM")
        texts.add(source(type(small.model), found))
    assert len(texts) == 1


def test_the_users_random_stream_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draft("StableLmForCausalLM")
    assert torch.equal(torch.get_rng_state(), before)


def _stablelm() -> Any:
    torch.manual_seed(0)
    config = transformers.StableLmConfig(
        vocab_size=53, hidden_size=32, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.StableLmForCausalLM(config).double()


def _inferred(how: str) -> tuple[float, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardcore").addHandler(handler)
    ids = torch.arange(1, 11).view(2, 5)
    wanted = _stablelm()(input_ids=ids, labels=ids).loss
    model = shardcore.shard(_stablelm(), tp=2, policy="infer", infer=how)
    got = model(input_ids=ids, labels=ids).loss
    logging.getLogger("shardcore").removeHandler(handler)
    return float((got - wanted).detach().abs()), said


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["proved", "drafted"])
def test_inferred_at_run_time(pool: WorkerPool, how: str) -> None:
    (error, (said,)), (other, nothing) = pool.run(_inferred, how, world=2, timeout=300)
    assert error < 1e-12
    assert other < 1e-12
    assert not nothing  # it is said once
    assert ("proved: outputs, loss, gradients" in said) == (how == "proved")
    assert ("on 2 ranks, tokens split and not" in said) == (how == "proved")
    assert "shardcore new-pack" in said


@pytest.mark.parametrize(
    ("section", "rule", "doubt"),
    [
        ("sequence", "sequence(", "no sequence parallelism"),
        ("captured", "outputs(", "attention weights and hidden states are refused"),
    ],
)
def test_what_was_not_proved_is_refused(monkeypatch, section: str, rule: str, doubt: str) -> None:
    def examined(pool: Any, subject: Subject, examining: str, **options: Any) -> list[Finding]:
        state, message = ("failed", "layers.0 differs") if examining == section else ("passed", "")
        return [Finding(check=section, state=state, message=message)]

    monkeypatch.setattr(proof, "examine", examined)
    config = _stablelm().config.to_json_string(use_diff=False)
    found = infer.answer("transformers", "StableLmForCausalLM", config, proved=True)
    assert rule not in found["source"]
    assert f"{doubt}: {section}: layers.0 differs" in found["doubts"]
    assert ("tokens split" in found["proof"]) == (section != "sequence")


@pytest.mark.nightly
def test_inferred_while_a_checkpoint_is_read(pool: WorkerPool, tmp_path) -> None:
    _stablelm().save_pretrained(tmp_path)
    assert all(error < 1e-12 for error in pool.run(_read, str(tmp_path), world=2, timeout=300))


def _read(folder: str) -> float:
    ids = torch.arange(1, 11).view(2, 5)
    model = shardcore.from_pretrained("StableLmForCausalLM", folder, tp=2, policy="infer", infer="drafted")
    return float((model(input_ids=ids, labels=ids).loss - _stablelm()(input_ids=ids, labels=ids).loss).detach().abs())


def _refused(build_model: Any, words: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        shardcore.shard(build_model(), tp=2, **options)


def test_what_has_no_configuration_is_refused_on_all_ranks(pool: WorkerPool) -> None:
    pool.run(_refused, functools.partial(torch.nn.Linear, 4, 4), "Linear has none", policy="infer", world=2)


class _Odd:
    def to_json_string(self, **options: Any) -> str:
        raise OSError("gone")


def _odd() -> Any:
    model = _stablelm()
    model.config = _Odd()
    return model


def test_a_process_that_fails_is_an_error_on_all_ranks(pool: WorkerPool) -> None:
    pool.run(_refused, _odd, "could be inferred: OSError: gone", policy="infer", world=2)


class _Composite(_Odd):
    def __init__(self, text: Any) -> None:
        self.text_config = text


def _with_text() -> Any:
    model = _stablelm()
    model.model.config = object()
    model.config = _Composite(model.model.config)
    return model


def test_a_model_around_a_language_model_is_told_of_it() -> None:
    with pytest.raises(ConfigError, match=r"could be inferred: OSError: gone.*shardcore\.shard\(model\.model, "):
        inferred.inferred(_with_text(), "proved", None)


def _impatient() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCORE_CACHE", "")
        patch.setattr("shardcore_scaffold.inferred.time_limit", lambda group: datetime.timedelta(seconds=1))
        _refused(_stablelm, "could be inferred: it took more than 1 s", policy="infer")


def test_it_ends_before_the_other_ranks_stop_waiting(pool: WorkerPool) -> None:
    pool.run(_impatient, world=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"policy": "guess"}, "policy='guess'; wanted"), ({"policy": "infer", "infer": "maybe"}, "got 'maybe'")],
)
def test_other_words_are_refused(pool: WorkerPool, options: dict[str, str], words: str) -> None:
    pool.run(_refused, _stablelm, words, world=2, **options)


def test_without_it_both_ways_are_offered() -> None:
    with pytest.raises(NoPolicyError, match='policy="infer"') as caught:
        shardcore.shard(_stablelm(), tp=1)
    assert "new-pack" in str(caught.value)
