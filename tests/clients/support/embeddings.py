"""Sentence transformers, sharded or not, that need no download: what tests of them compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import sentence_transformers
import torch
import torch.distributed as dist
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.evaluation import (
    BinaryClassificationEvaluator,
    EmbeddingSimilarityEvaluator,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CosineSimilarityLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
    SoftmaxLoss,
)
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import shardcore
from trainings_by_clients import SETTINGS, by_torchrun, parameters  # from support/

WORDS = [f"w{number}" for number in range(90)]
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # masks are no part of the comparison


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(count)]


def folder_of_bert(folder: Path) -> Path:
    """Write a small BERT and its tokenizer, as a checkpoint holds them."""
    import transformers

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **SIZES, **STILL)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def built(folder: str, mesh: Mapping[str, Any] | None) -> Any:
    if dist.get_rank() == 0:
        folder_of_bert(Path(folder, "bert"))
    dist.barrier()
    body = Transformer(str(Path(folder, "bert")), max_seq_length=32)
    model = sentence_transformers.SentenceTransformer(
        modules=[body, Pooling(SIZES["hidden_size"], pooling_mode="mean")], device="cpu"
    ).double()
    if mesh:
        shardcore.shard(model[0].auto_model, **mesh)  # in place
    return model


def encoded(folder: str, mesh: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return embeddings, of the model and of what it has saved."""
    model = built(folder, mesh)
    found = model.encode(sentences(9), batch_size=4, convert_to_tensor=True)
    model.save(str(Path(folder, "saved")))
    dist.barrier()
    alone = sentence_transformers.SentenceTransformer(str(Path(folder, "saved")), device="cpu").double()
    return {"embeddings": found, "reloaded": alone.encode(sentences(9), batch_size=4, convert_to_tensor=True)}


class Word(str):
    """A sentence that has another place in the sets of each rank, as if their PYTHONHASHSEED differed."""

    def __hash__(self) -> int:
        return hash((str(self), dist.get_rank()))


def classifying(model: Any) -> Any:
    """Return a loss with a classifier, drawn in another way by each rank."""
    torch.manual_seed(dist.get_rank())
    return SoftmaxLoss(model, SIZES["hidden_size"], num_labels=3).double()


#: How pairs are trained on, by name; those of rows with other rows of the batch take no score.
LOSSES: dict[str, Callable[[Any], Any]] = {
    "scores": CosineSimilarityLoss,
    "ranking": MultipleNegativesRankingLoss,
    "gathered": lambda model: MultipleNegativesRankingLoss(model, gather_across_devices=True),
    "cached": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=1),
    "classes": classifying,
    "both gathered": lambda model: MatryoshkaLoss(model, LOSSES["gathered"](model), [16, 32]),
}


def trainer_of(
    folder: str,
    mesh: Mapping[str, Any] | None,
    loss: str = "scores",
    evaluated: int = 8,
    *,
    native: bool = False,
    **options: Any,
) -> Any:
    """Return a trainer by pairs of sentences, for a loss of `LOSSES`; on wish the library's own."""
    from shardcore_trainer import sharded

    trainer = sentence_transformers.SentenceTransformerTrainer
    model = built(folder, mesh)
    draw = random.Random(1)
    rows: dict[str, Any] = {"one": sentences(16, 1), "other": sentences(16, 2)}
    scores = [draw.random() for _ in range(16)]
    columns = {"scores": {"score": scores}, "classes": {"label": [at % 3 for at in range(16)]}}
    data = datasets.Dataset.from_dict(rows | columns.get(loss, {}))
    one, other = ([Word(sentence) for sentence in rows[name]] for name in ("one", "other"))
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        **{
            "output_dir": str(Path(folder, "run")),
            "max_steps": 4,
            **SETTINGS,
            "use_cpu": True,
            **options,
        }
    )
    return (trainer if native else sharded(trainer))(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(evaluated)),
        loss=LOSSES[loss](model),
        evaluator=[
            BinaryClassificationEvaluator(one, other, [at % 2 for at in range(16)], batch_size=4, name="alike"),
            EmbeddingSimilarityEvaluator(rows["one"], rows["other"], scores, batch_size=4, name="pairs"),
        ],
    )


def trained(folder: str, mesh: Mapping[str, Any] | None, loss: str = "scores", **options: Any) -> dict[str, Any]:
    """Train, and return what was logged and the parameters."""
    trainer = trainer_of(folder, mesh, loss, **options)
    trainer.train()
    trainer.evaluate()
    return told_of(trainer)


def told_of(trainer: Any) -> dict[str, Any]:
    own = {f"loss.{name}": value for name, value in parameters(trainer.loss).items() if not name.startswith("model.")}
    state = trainer.state
    return {
        "history": state.log_history,
        "steps": state.global_step,
        "parameters": parameters(trainer.model) | own,
    }


def checkpointed(folder: str, mesh: Mapping[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Train with checkpoints, load the best of them, and go on from the first; each is read by one process."""
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}  # the worst
    trainer = trainer_of(folder, mesh, **often, **best, **options)
    trainer.train()
    found = told_of(trainer)
    dist.barrier()
    saved = {}
    for step in (2, 4):
        place = Path(folder, "run", f"checkpoint-{step}")
        alone = sentence_transformers.SentenceTransformer(str(place), device="cpu").double()
        card = Path(place, "README.md").read_text().partition("print(similarities)")[2].partition("```")[0]
        saved[step] = {"parameters": parameters(alone), "shown": card}
    found |= {"best": Path(trainer.state.best_model_checkpoint).name, "saved": saved}
    if not options.get("save_only_model"):
        again = trainer_of(folder, mesh, **{**often, **options})
        again.train(resume_from_checkpoint=str(Path(folder, "run", "checkpoint-2")))
        found["resumed"] = told_of(again)["parameters"]
    return found


def crossed(folder: str, mesh: Mapping[str, Any] | None) -> Any:
    """Return a small cross-encoder."""
    import transformers

    place = Path(folder, "bert")
    if dist.get_rank() == 0:
        folder_of_bert(place)
        torch.manual_seed(0)
        config = transformers.BertConfig.from_pretrained(place, num_labels=1)
        transformers.BertForSequenceClassification(config).save_pretrained(place)
    dist.barrier()
    model = sentence_transformers.CrossEncoder(str(place), max_length=32, device="cpu").double()
    if mesh:
        shardcore.shard(model[0].auto_model, **mesh)  # in place
    return model


def trained_across(folder: str, mesh: Mapping[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Train a cross-encoder by pairs that belong together or do not, and return what it predicts, too."""
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    from shardcore_trainer import sharded

    model = crossed(folder, mesh)
    rows = {"one": sentences(16, 1), "other": sentences(16, 2), "label": [at % 2 for at in range(16)]}
    options = {"max_steps": 4, **SETTINGS, "use_cpu": True, **options}
    trainer = sharded(sentence_transformers.CrossEncoderTrainer)(
        model=model,
        args=sentence_transformers.CrossEncoderTrainingArguments(output_dir=str(Path(folder, "run")), **options),
        train_dataset=datasets.Dataset.from_dict(rows),
        loss=BinaryCrossEntropyLoss(model),
    )
    trainer.train()
    predicted = model.predict(list(zip(rows["one"], rows["other"], strict=True)), convert_to_tensor=True)
    return told_of(trainer) | {"predicted": predicted}


def refused(folder: str, build: Callable[..., Any] = built) -> str:
    """Return the words with which `shardcore.shard` refuses the whole pipeline."""
    try:
        shardcore.shard(build(folder, None), tp=2)
    except shardcore.NotSupportedError as error:
        return str(error)
    return "it is not refused"


def words_of_native(folder: str, mesh: Mapping[str, Any]) -> str:
    """Return what torch says of the library's own trainer, which wraps the model in DDP."""
    with by_torchrun():
        try:
            trainer_of(folder, mesh, native=True).train()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def words_of_unlike(folder: str, mesh: Mapping[str, Any]) -> str:
    """Return the words of an evaluator outside of a trainer, that goes by a set of another order on each rank."""
    one, other = ([Word(sentence) for sentence in sentences(16, seed)] for seed in (1, 2))
    try:
        BinaryClassificationEvaluator(one, other, [at % 2 for at in range(16)], batch_size=4)(built(folder, mesh))
    except shardcore.errors.AgreementError as error:
        return str(error)
    return "it is not refused"


def words_of(folder: str, mesh: Mapping[str, Any], loss: str, evaluated: int, **options: Any) -> str:
    """Return the words with which a trainer, its evaluation, or its training is refused; no step was made."""
    try:
        trainer = trainer_of(folder, mesh, loss, evaluated, per_device_eval_batch_size=2, **options)
        trainer.evaluate()
        if options:
            trainer.train()
    except shardcore.NotSupportedError as error:
        return str(error)
    return "it is not refused"
