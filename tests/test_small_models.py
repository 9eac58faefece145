"""Small models of classes of transformers, and calls that these take."""

from __future__ import annotations

import functools
import importlib
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves

from shardcore.errors import ConfigError
from shardcore_testing import Case, Supports
from shardcore_testing.checks import examine
from shardcore_testing.islands import in_float64
from shardcore_testing.subject import Subject

transformers = pytest.importorskip("transformers")

from shardcore_scaffold import infer, small  # noqa: E402
from shardcore_scaffold.calls import like  # noqa: E402
from shardcore_scaffold.small import config_of, small_model  # noqa: E402


def test_widths_are_equal_where_they_are_in_the_configuration() -> None:
    small = small_model(transformers.ElectraForMaskedLM)
    assert small.settings["embedding_size"] != small.settings["hidden_size"]
    assert any(name.endswith("embeddings_project") for name, _ in small.model.named_modules())
    equal = transformers.ElectraConfig(embedding_size=256, hidden_size=256)
    small = small_model(transformers.ElectraForMaskedLM, equal)
    assert small.settings["embedding_size"] == small.settings["hidden_size"]
    assert not any(name.endswith("embeddings_project") for name, _ in small.model.named_modules())


@pytest.mark.parametrize("name", ["EsmForMaskedLM", "HunYuanDenseV1ForCausalLM", "NemotronForCausalLM"])
def test_what_the_configuration_leaves_open_is_chosen(name: str) -> None:
    small = small_model(getattr(transformers, name))  # without a number of words, of heads, or a token that pads
    assert torch.isfinite(small.model(**small.inputs)["loss"])


def test_every_switch_of_the_configuration_is_in_the_small_copy() -> None:
    kinds = [*["linear_attention"] * 3, "full_attention"] * 2
    given = transformers.Qwen3NextConfig(num_hidden_layers=8, layer_types=kinds, mlp_only_layers=[0])
    config = small_model(transformers.Qwen3NextForCausalLM, given).model.config
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert config.mlp_only_layers == [0]
    assert config.num_attention_heads > 2 * config.num_key_value_heads  # a gate beside queries is no key and value


def test_infinities_come_back_as_they_went() -> None:
    config = transformers.Mamba2Config()
    again = config_of(transformers.Mamba2ForCausalLM, config.to_json_string(use_diff=False))
    assert again.time_step_limit[1] == float("inf") == config.time_step_limit[1]


def test_a_text_has_as_many_tokens_as_its_images_have_features() -> None:
    vision = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 14}
    given = transformers.LlavaConfig(vision_config=vision, text_config={"model_type": "llama"})
    small = small_model(transformers.LlavaForConditionalGeneration, given)
    ids, image = small.inputs["input_ids"], small.model.config.image_token_id
    (features,) = {len(each) for each in small.model.get_image_features(small.inputs["pixel_values"]).pooler_output}
    assert ((ids == image).sum(1) == features).all()
    other = like(small.inputs, small.model, seed=1)
    assert ((other["input_ids"] == image) == (ids == image)).all()
    assert not torch.equal(other["input_ids"], ids)
    assert not torch.equal(other["pixel_values"], small.inputs["pixel_values"])


def test_a_class_that_translates_learns_from_tokens() -> None:
    small = small_model(transformers.MarianMTModel)
    assert small.inputs["labels"].shape == small.inputs["input_ids"].shape


def test_a_class_that_generates_is_a_decoder() -> None:
    given = transformers.ElectraConfig()
    assert small_model(transformers.ElectraForCausalLM, given, generating=True).settings["is_decoder"] is True
    assert "is_decoder" not in small_model(transformers.ElectraForMaskedLM, given, generating=True).settings
    assert small_model(transformers.ElectraForCausalLM, given).model.config.is_decoder is False  # as it was given


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("LongformerForQuestionAnswering", "input_ids"),  # with three marks between question and text
        ("LxmertForQuestionAnswering", "visual_feats"),
        ("MusicgenForCausalLM", "input_ids"),  # a row for each codebook
        ("PatchTSTForRegression", "past_values"),
        ("Pix2StructForConditionalGeneration", "flattened_patches"),
        ("SpeechT5ForTextToSpeech", "decoder_input_values"),
        ("ViTMAEModel", "noise"),
    ],
)
def test_what_only_some_models_take_is_made(name: str, argument: str) -> None:
    small = small_model(getattr(transformers, name))
    assert argument in small.inputs
    twice = [small.model(**small.inputs) for _ in range(2)]
    for first, second in zip(*map(tree_leaves, twice), strict=True):
        assert not isinstance(first, torch.Tensor) or torch.equal(first, second)


def test_a_class_with_a_generate_of_its_own_is_sharded_too() -> None:
    cls = transformers.PatchTSTForRegression  # no GenerationMixin
    told = infer.answer(cls.__module__, cls.__name__, cls.config_class().to_json_string(use_diff=False), proved=False)
    assert told["split"] > 0.5


@pytest.mark.parametrize("name", ["VitPoseForPoseEstimation", "VisionEncoderDecoderModel"])
def test_sizes_that_must_fit_each_other_are_divided_all_alike(name: str) -> None:
    small = small_model(getattr(transformers, name))
    assert sum(parameter.numel() for parameter in small.model.parameters()) < 2e6
    assert "pixel_values" in small.inputs


@pytest.mark.parametrize(
    "name", ["SwitchTransformersForConditionalGeneration", "XGLMForCausalLM", "SplinterForPreTraining"]
)
def test_what_a_model_keeps_in_float32_is_in_float64(name: str) -> None:
    found = small_model(getattr(transformers, name))
    with in_float64():
        leaves = tree_leaves(found.model(**found.inputs))
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    assert all(leaf.dtype is torch.float64 and leaf.isfinite().all() for leaf in numbers)


def test_feature_maps_are_as_large_as_the_images_of_the_small_copy() -> None:
    config = small_model(transformers.Sam3TrackerModel).model.config.vision_config
    patches = config.backbone_config.image_size // config.backbone_config.patch_size
    assert config.backbone_feature_sizes == [[n * patches] * 2 for n in (4, 2, 1)]


@pytest.mark.nightly
def test_no_settings_and_no_call_are_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Backbone(transformers.ResNetBackbone):
        def forward(self, pixel_values: torch.Tensor) -> None:
            tried.append(f"{self.config.to_json_string()} {tuple(pixel_values.shape)}")
            raise ValueError("it takes no images")

    with pytest.raises(ConfigError, match="it takes no images"):
        small_model(Backbone, transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16] * 4, depths=[1] * 4))
    assert len(tried) > 1
    assert len(set(tried)) == len(tried)


def test_a_small_model_was_never_called() -> None:
    model = small_model(transformers.LevitModel).model  # keeps the biases of its attention that it looked up
    assert not any(module.attention_bias_cache for module in model.modules() if hasattr(module, "attention_bias_cache"))


@pytest.mark.skipif(not hasattr(transformers, "GlmOcrForConditionalGeneration"), reason="newer than this transformers")
def test_heads_turn_by_parts_that_are_as_long_as_what_turns() -> None:
    small = small_model(transformers.GlmOcrForConditionalGeneration)  # parts of [8, 12, 12], where no other are given
    assert not small.left_out
    assert small.settings["text_config"]["rope_parameters"]["mrope_section"] == [2, 1, 1]


@pytest.mark.skipif(not hasattr(transformers, "PaddleOCRVLForConditionalGeneration"), reason="newer than this")
def test_a_model_whose_images_nobody_can_make_is_called_with_text() -> None:
    cls = transformers.PaddleOCRVLForConditionalGeneration
    small = small_model(cls)
    assert "input_ids" in small.inputs
    assert "pixel_values" not in small.inputs
    assert small.left_out.startswith("pixel_values (")
    told = infer.answer(cls.__module__, cls.__name__, small.model.config.to_json_string(use_diff=False), proved=False)
    assert any("text alone" in doubt and "pixel_values" in doubt for doubt in told["doubts"])
    assert "visual" not in told["source"]  # neither split nor cut


def test_a_proof_trains_models_that_draw_nothing() -> None:
    config = transformers.Starcoder2Config().to_json_string(use_diff=False)
    model = infer.build("transformers", "Starcoder2ForTokenClassification", config)
    assert model.training
    assert [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)] == [0.0]
    assert small_model(transformers.HubertForCTC).settings["mask_time_prob"] == 0.0


def test_other_tokens_are_tokens_where_the_input_is_sound() -> None:
    found = small_model(transformers.Speech2TextForConditionalGeneration)
    other = like(found.inputs, found.model, seed=1)
    assert {name: value.dtype for name, value in other.items()} == {n: v.dtype for n, v in found.inputs.items()}


def test_the_model_of_a_case_can_do_without_its_last_block() -> None:
    """Else the collectives of one block more could not be counted."""
    alone, followed = (small_model(transformers.MllamaForCausalLM, generating=more).model for more in (False, True))
    assert small._ends_alone(alone)
    assert not small._ends_alone(followed)
    kinds = {type(block).__name__ for block in followed.model.layers}
    assert kinds == {"MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer"}


def _text_alone(model, seed, *, media=True, _called=small._called):
    if media:
        raise TypeError("no image is known")
    return _called(model, seed, media=False)


def _look_in(folder: str) -> None:
    sys.path.insert(0, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_what_was_inferred_from_text_alone_is_exact_with_images(pool, tmp_path, monkeypatch, name) -> None:
    cls = getattr(transformers, name)
    config = cls.config_class().to_json_string(use_diff=False)
    with_images = small_model(cls, config_of(cls, config))
    monkeypatch.setattr(small, "_called", _text_alone)
    told = infer.answer(cls.__module__, name, config, proved=False)
    monkeypatch.undo()
    module = f"of_text_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(told["source"])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(module)
    case = Case(
        name=name,
        build=functools.partial(infer.build, cls.__module__, name, config),
        inputs=functools.partial(like, with_images.inputs),
        loss=infer.loss_of,
        policy=f"{module}:{name}Policy",
        supports=Supports(sequence=False, captured=False),
    )
    pool.run(_look_in, str(tmp_path), world=2)
    findings = examine(pool, Subject(case=case, tp=2), "training")
    assert "pixel_values" in with_images.inputs
    assert [(f.check, f.message) for f in findings if f.state == "failed"] == []
