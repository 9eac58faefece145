"""Trainings by TRL, sharded or not, of texts that need no download: what tests of TRL compare."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import torch.distributed as dist
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import shardcore
from shardcore_testing.parity import whole
from trainings_by_clients import SETTINGS, by_torchrun, llama, parameters  # from support/

WORDS = [f"w{number}" for number in range(90)]
#: Every other message is an answer; the marks let the tokenizer tell words that are trained from the rest.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} <eos>{% endgeneration %}"
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer() -> Any:
    vocabulary = ["<pad>", "<eos>", "<unk>", "user", "assistant", *WORDS]
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.chat_template = TEMPLATE
    return fast


def texts(kind: str, count: int = 16) -> Any:
    """Rows of words; lengths and numbers of answered words differ."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    if kind == "text":
        rows = {"text": [words(4, 14) for _ in range(count)]}
    elif kind == "completion":
        rows = {"prompt": [words(3, 8) for _ in range(count)], "completion": [" " + words(2, 7) for _ in range(count)]}
    elif kind == "prompt":
        rows = {"prompt": [words(3, 8) for _ in range(count)]}
    elif kind == "judged":
        rows = {"prompt": [words(3, 8) for _ in range(count)], "completion": [" " + words(2, 7) for _ in range(count)]}
        rows["label"] = [at % 3 > 0 for at in range(count)]
    elif kind == "chat":
        rows = {
            "messages": [
                [{"role": "user", "content": words(2, 6)}, {"role": "assistant", "content": words(2, 6)}]
                for _ in range(count)
            ]
        }
    else:
        rows = {
            "prompt": [words(3, 8) for _ in range(count)],
            "chosen": [" " + words(2, 7) for _ in range(count)],
            "rejected": [" " + words(2, 7) for _ in range(count)],
        }
    return datasets.Dataset.from_dict(rows)


#: What trainers by rewards keep of the last completions.
_TABLE = ("prompt", "completion", "advantages")


def settings(kind: Any, folder: str, **more: Any) -> Any:
    return kind(
        **{
            "output_dir": folder,
            "max_steps": 4,
            **SETTINGS,
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            **more,
        }
    )


def reward(completions: Any, **others: Any) -> list[float]:
    """Answers are worth something by their place: those to one prompt may be equal."""
    return [float(at % 3) + 0.1 * len(answer) for at, answer in enumerate(completions)]


def worth(completions: Any, **others: Any) -> list[float]:
    """Answers are worth something by their letters, wherever they stand."""
    return [float(sum(map(ord, answer)) % 7) for answer in completions]


def answering(replica: int, *, together: bool) -> Any:
    """Return a ``generate`` whose answers follow from a prompt and its place among the rows of all replicas.

    With ``together`` it has to be told that replicas call the model equally often.
    """

    def generate(input_ids: torch.Tensor, synced_gpus: bool = False, **others: Any) -> torch.Tensor:
        assert synced_gpus == together
        answers = torch.zeros(len(input_ids), 6, dtype=torch.long)  # filled up with <pad>
        for row, prompt in enumerate(input_ids.tolist()):
            draw = random.Random(f"{[token for token in prompt if token]} {replica * len(input_ids) + row}")
            answer = [*draw.choices(range(5, 95), k=draw.randint(2, 5)), 1]
            answers[row, : len(answer)] = torch.tensor(answer)
        return torch.cat([input_ids, answers], dim=1)

    return generate


def trained(
    folder: str,
    mesh: Mapping[str, Any] | None,
    method: str = "SFT",
    kind: str = "text",
    options: Mapping[str, Any] | None = None,
    *,
    adapters: Any = None,
    before: bool = False,
    drawn: int | None = None,
    reference: float | None = None,
    whole_reference: bool = False,
    saved: float | None = None,
    rewards: Any = None,
    answers: bool = False,
    evaluate: int = 0,
) -> dict[str, Any]:
    """Train by ``trl.{method}Trainer``, and return what it logged and the parameters after it.

    Args:
        folder: where it may write.
        mesh: what `shardcore.shard` gets; None for the unsharded model.
        method: which trainer.
        kind: of `texts`.
        options: of its configuration.
        adapters: their settings, given to the trainer.
        before: attached before `shardcore.shard`, and not given to the trainer.
        drawn: seed of the values that the trainer's adapters get; None: what they were made with, which is not the same
            on data-parallel replicas as in one process.
        reference: by what the parameters of the reference model are multiplied that it gets; None: it gets none.
        whole_reference: leave it unsharded.
        saved: the same, of one in a folder, which the configuration of the model names.
        rewards: a function.
        answers: let the model give those of `answering`, instead of drawing its own.
        evaluate: so many rows after the training.
    """
    from shardcore_trainer import sharded

    def build(factor: float = 1.0) -> Any:
        model = llama(max_position_embeddings=64)
        if method == "Reward":
            model.config.update({"num_labels": 1, "pad_token_id": 0})
            torch.manual_seed(0)
            model = transformers.LlamaForSequenceClassification(model.config).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return model

    def shard(model: Any) -> Any:
        return shardcore.shard(model, **mesh) if mesh else model

    given: dict[str, Any] = {}
    if saved is not None:
        place = Path(folder, "reference")
        build(saved).save_pretrained(place)  # on the first rank
        dist.barrier()
        model = build()
        model.config._name_or_path = str(place)
    else:
        model = build()
    if adapters is not None and before:
        transformers.set_seed(42)
        model = shard(peft.get_peft_model(model, adapters))
    else:
        model = shard(model)
        given |= {} if adapters is None else {"peft_config": adapters}
    if reference is not None:
        given["ref_model"] = build(reference) if whole_reference else shard(build(reference))
    if rewards is not None:
        given["reward_funcs"] = rewards
    if answers:
        several = mesh is not None and mesh.get("dp", 1) > 1
        model.generate = answering(dist.get_rank() // mesh["tp"] if mesh else 0, together=several)
    transformers.set_seed(42)  # some releases draw adapters with what there is
    trainer = sharded(getattr(trl, f"{method}Trainer"))(
        model=model,
        args=settings(getattr(trl, f"{method}Config"), folder, **(options or {})),
        train_dataset=texts(kind),
        eval_dataset=texts(kind, evaluate) if evaluate else None,
        processing_class=tokenizer(),
        **given,
    )
    if drawn is not None:
        draw = torch.Generator().manual_seed(drawn)
        values = {
            name: 0.1 * torch.randn(whole(p.detach()).shape, generator=draw, dtype=p.dtype)
            for name, p in trainer.model.named_parameters()
            if "lora_" in name
        }
        assert values
        assert not trainer.model.load_state_dict(values, strict=False).unexpected_keys
    trainer.train()
    if evaluate:
        trainer.evaluate()
    adapters_of = getattr(trainer.model, "peft_config", None)
    return {
        "history": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "adapters": sorted(adapters_of) if adapters_of else [],
        "parameters": parameters(trainer.model),
        "table": {name: list(values) for name, values in getattr(trainer, "_logs", {}).items() if name in _TABLE},
    }


def launched(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Train in processes that torchrun has started, so that arguments of trainers count them."""
    with by_torchrun():
        return trained(*args, **kwargs)


def refused(*args: Any, **kwargs: Any) -> str:
    """Return the words with which a training is refused."""
    try:
        launched(*args, **kwargs)
    except shardcore.errors.ShardcoreError as error:
        return str(error)
    return "it is not refused"
