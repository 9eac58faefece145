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
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CosineSimilarityLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import shardcore
from trainings_by_clients import SETTINGS, parameters  # from support/

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


#: How pairs are trained on, by name; those of rows with other rows of the batch take no score.
LOSSES: dict[str, Callable[[Any], Any]] = {
    "scores": CosineSimilarityLoss,
    "ranking": MultipleNegativesRankingLoss,
    "gathered": lambda model: MultipleNegativesRankingLoss(model, gather_across_devices=True),
    "cached": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=1),
    "both gathered": lambda model: MatryoshkaLoss(model, LOSSES["gathered"](model), [16, 32]),
}


def trainer_of(
    folder: str, mesh: Mapping[str, Any] | None, loss: str = "scores", evaluated: int = 8, **options: Any
) -> Any:
    """Return a trainer by pairs of sentences, for a loss of `LOSSES`."""
    from shardcore.integrations.trainer import sharded

    model = built(folder, mesh)
    draw = random.Random(1)
    rows: dict[str, Any] = {"one": sentences(16, 1), "other": sentences(16, 2)}
    scores = [draw.random() for _ in range(16)]
    data = datasets.Dataset.from_dict(rows | ({"score": scores} if loss == "scores" else {}))
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        **{
            "output_dir": str(Path(folder, "run")),
            "max_steps": 4,
            **SETTINGS,
            "use_cpu": True,
            **options,
        }
    )
    return sharded(sentence_transformers.SentenceTransformerTrainer)(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(evaluated)),
        loss=LOSSES[loss](model),
        evaluator=EmbeddingSimilarityEvaluator(rows["one"], rows["other"], scores, batch_size=4, name="pairs"),
    )


def trained(folder: str, mesh: Mapping[str, Any] | None, loss: str = "scores", **options: Any) -> dict[str, Any]:
    """Train, and return what was logged and the parameters."""
    trainer = trainer_of(folder, mesh, loss, **options)
    trainer.train()
    trainer.evaluate()
    model, state = trainer.model, trainer.state
    return {"history": state.log_history, "steps": state.global_step, "parameters": parameters(model)}


def refused(folder: str) -> str:
    """Return the words with which `shardcore.shard` refuses the whole pipeline."""
    try:
        shardcore.shard(built(folder, None), tp=2)
    except shardcore.NotSupportedError as error:
        return str(error)
    return "it is not refused"


def words_of(folder: str, mesh: Mapping[str, Any], loss: str, evaluated: int) -> str:
    """Return the words with which a trainer, or its evaluation, is refused; no step was made."""
    try:
        trainer_of(folder, mesh, loss, evaluated, per_device_eval_batch_size=2).evaluate()
    except shardcore.NotSupportedError as error:
        return str(error)
    return "it is not refused"
