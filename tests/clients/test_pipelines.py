"""Pipelines of transformers that all ranks call with a sharded model answer as with the unsharded one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore

transformers = pytest.importorskip("transformers")

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainings_by_clients import case_of  # noqa: E402  # from support/

WORDS = [f"w{number}" for number in range(90)]
PROMPTS = ["w3 w14 w15", "w9", "w26 w5 w35 w8 w9 w7"]  # of three lengths: a batch of them is padded
ASKED = {"max_new_tokens": 6, "do_sample": False}


pytestmark = pytest.mark.usefixtures("float64_throughout")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **marks)


def tokenizer_of_speech(folder: Path) -> Any:
    """Return Whisper's tokenizer, whose words are letters and signs; the files are written by each caller."""
    folder.mkdir(parents=True)
    vocabulary = {chr(33 + at): at for at in range(94)}
    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>", *(f"<|{i * 0.02:.2f}|>" for i in range(51))]
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {m: len(vocabulary) + at for at, m in enumerate(marks)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    made = transformers.WhisperTokenizer.from_pretrained(folder)
    made.add_special_tokens({"pad_token": marks[0], "additional_special_tokens": marks[1:]})
    return made


def twins(
    family: str, name: str, change: Callable[[Any], None] = lambda model: None, **options: Any
) -> tuple[Any, Any]:
    """Return a model, and the same one sharded."""
    whole, parts = (case_of(family, name).build(**options).double().eval() for _ in range(2))
    change(whole)
    change(parts)
    return whole, shardcore.shard(parts, tp=2)


def same(got: Any, wanted: Any, place: str = "") -> None:
    """Compare answers: texts and structure are equal, scores to 1e-9."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), place
        for key in wanted:
            same(got[key], wanted[key], f"{place}.{key}")
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), place
        for at, pair in enumerate(zip(got, wanted, strict=True)):
            same(*pair, f"{place}[{at}]")
    elif isinstance(wanted, float):
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), place
    else:
        assert got == wanted, place


class Heard(transformers.TextStreamer):
    """Keeps what it is given in the place of printing it."""

    def __init__(self, words: Any) -> None:
        super().__init__(words)
        self.pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)


def generated() -> list[str]:
    words = tokenizer()
    sizes = {"vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True}
    pair = twins("llama", "causal_lm", **sizes)
    drafts = twins("llama", "causal_lm", num_hidden_layers=1, **sizes)
    pipes = [transformers.pipeline("text-generation", model=model, tokenizer=words) for model in pair]
    answers = []
    for ways in (
        {},
        {"batch_size": 3},
        {"num_beams": 3},
        {"return_full_text": False, "repetition_penalty": 1.3},
        {"cache_implementation": "static"},
    ):
        wanted, got = (pipe(PROMPTS, **ASKED, **ways) for pipe in pipes)
        same(got, wanted, str(ways))
        answers.append([answer["generated_text"] for row in got for answer in row])
    heard = [Heard(words) for _ in pipes]
    for pipe, streamer in zip(pipes, heard, strict=True):
        pipe(PROMPTS[0], streamer=streamer, **ASKED)
    assert heard[0].pieces == heard[1].pieces
    assert len(heard[1].pieces) > 3
    # The tokens come from a second thread, which generates, while this one reads them.
    streamer = transformers.TextIteratorStreamer(words, timeout=20)
    thread = Thread(target=pipes[1], args=(PROMPTS[0],), kwargs={**ASKED, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == "".join(heard[0].pieces)
    # A draft by a smaller model, whole on each rank or sharded too, leaves the answers as they are.
    for draft in drafts:
        got = transformers.pipeline("text-generation", model=pair[1], tokenizer=words, assistant_model=draft)
        same(got(PROMPTS[0], **ASKED), pipes[0](PROMPTS[0], **ASKED), "assisted")
    # Samples are those of the sharded model's own stream, the same on all ranks.
    torch.manual_seed(dist.get_rank())
    sampled = pipes[1](PROMPTS, max_new_tokens=6, do_sample=True)
    answers.append([answer["generated_text"] for row in sampled for answer in row])
    return [text for row in answers for text in row]


def test_text_generation(pool):
    first, second = pool.run(generated)
    assert first == second
    assert len(set(first)) > 8  # no two prompts are answered alike


def asked_for_other_texts(every: int, unnoticed: int) -> None:
    """Ranks whose texts differ get an error from the first generation after so many calls."""
    words = tokenizer()
    model = case_of("llama", "causal_lm").build(vocab_size=len(words)).double().eval()
    model = shardcore.shard(model, tp=2, check_inputs_every=every)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words)
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}  # six calls of the model
    pipe("w1 w2 w3", **asked)
    other = ["w3 w14 w15", "w9 w8 w7"][dist.get_rank()]  # as long, so that nothing else fails
    for _ in range(unnoticed):
        pipe(other, **asked)
    with pytest.raises(shardcore.AgreementError, match="different inputs: input_ids"):
        pipe(other, **asked)


@pytest.mark.parametrize(("every", "unnoticed"), [(1, 0), (6, 0), (8, 1)])
def test_other_texts_on_other_ranks(pool, every, unnoticed):
    pool.run(asked_for_other_texts, every, unnoticed)


def classified() -> None:
    words = tokenizer()
    words.padding_side = "right"
    pair = twins("bert", "sequence_classification", vocab_size=len(words), num_labels=3)
    pipes = [transformers.pipeline("text-classification", model=model, tokenizer=words) for model in pair]
    with pytest.raises(shardcore.AgreementError, match="different inputs"):
        pipes[1](PROMPTS[2 * dist.get_rank()])  # ranks ask for something else
    for ways in ({}, {"batch_size": 3, "top_k": None}, {"function_to_apply": "none"}):
        wanted, got = (pipe(PROMPTS, **ways) for pipe in pipes)
        same(got, wanted, str(ways))


def test_text_classification(pool):
    pool.run(classified)


def listening(model: Any) -> None:
    """Draw parameters of a Whisper that writes other words for other sounds."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            hears = "encoder_attn" in name and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.8 if hears else 0.2))
            parameter.add_(float("layer_norm.weight" in name))


def heard(folder: str) -> None:
    import numpy

    words = tokenizer_of_speech(Path(folder, str(dist.get_rank())))
    ear = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    start, still = words.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"])
    pair = twins(
        "whisper",
        "speech_to_text",
        listening,
        vocab_size=len(words),
        max_source_positions=50,
        decoder_start_token_id=start,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), words.eos_token_id),
    )
    pipes = []
    for model in pair:
        model.generation_config.no_timestamps_token_id = still
        model.generation_config.is_multilingual = False
        model.generation_config.max_initial_timestamp_index = 10
        task = "automatic-speech-recognition"
        pipes.append(transformers.pipeline(task, model=model, tokenizer=words, feature_extractor=ear))
    draw = numpy.random.default_rng(0)
    sounds = [draw.standard_normal(length).astype("float32") for length in (16000, 9000, 12000)]
    said = {"max_new_tokens": 8, "num_beams": 1}
    with pytest.raises(shardcore.AgreementError, match="different inputs: input_features"):  # of the encoder
        pipes[1](sounds[0][:: 1 - 2 * dist.get_rank()].copy(), generate_kwargs=said)
    for ways in (
        {"generate_kwargs": said},
        {"generate_kwargs": {**said, "num_beams": 3}, "batch_size": 3},
        {"generate_kwargs": said, "return_timestamps": True},
    ):
        wanted, got = (pipe([sound.copy() for sound in sounds], **ways) for pipe in pipes)
        assert len({answer["text"] for answer in wanted}) == 3
        same(got, wanted, str(ways))


def test_speech_recognition(pool, tmp_path):
    pool.run(heard, str(tmp_path))


def seen() -> None:
    from PIL import Image

    pair = twins("vit", "image_classification")
    size = pair[0].config.image_size
    eye = transformers.ViTImageProcessor(size={"height": size, "width": size})
    pipes = [transformers.pipeline("image-classification", model=model, image_processor=eye) for model in pair]
    pixels = torch.randint(0, 256, (3, 40, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = [Image.fromarray(image.numpy()) for image in pixels]
    for ways in ({}, {"batch_size": 3, "top_k": 2}):
        wanted, got = (pipe(images, **ways) for pipe in pipes)
        same(got, wanted, str(ways))


def test_image_classification(pool):
    pytest.importorskip("PIL", reason="the pipeline reads images by Pillow, which is not installed")
    pool.run(seen)
