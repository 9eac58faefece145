"""lm-eval, and streams of datasets: a model is evaluated as the unsharded one, and data goes on where it was."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = """
task: kinds
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: {kind}
doc_to_text: question
doc_to_target: {target}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
KINDS = ["a beast", "a plant", "a machine"]


def script(name: str, *arguments: str, folder: Path) -> str:
    """Run an example on the rank that this is; return what it prints."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of lm-eval's, about itself and what it asks of transformers
@pytest.mark.parametrize(
    ("kind", "metric", "target"), [("multiple_choice", "acc", "answer"), ("generate_until", "exact_match", "text")]
)
def test_scores_are_those_of_one_process(pool, tmp_path, kind, metric, target):
    pytest.importorskip("lm_eval")
    pool.run(script, "small.py", "llama", "llama", folder=tmp_path, world=1, timeout=100)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    rows = []
    for number, name in enumerate(["dog", "oak", "mill", "cat", "fir", "loom"]):
        ids = tokenizer(f"a {name} is", return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.size(1) :]  # every other one is right
        text = tokenizer.decode(new) if number % 2 else "nothing of the kind"
        rows.append({"question": f"a {name} is", "choices": KINDS, "answer": number % 3, "text": text})
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    task = TASK.format(questions=questions, kind=kind, metric=metric, target=target)
    task += "generation_kwargs: {max_gen_toks: 4, until: []}" if kind == "generate_until" else "doc_to_choice: choices"
    (tmp_path / "tasks" / "kinds.yaml").write_text(task)
    flags = ("--model", "llama", "--tasks", "kinds", "--include", "tasks", "--dtype", "float32", "--batch", "4")
    one, two = (pool.run(script, "evaluate.py", *flags, folder=tmp_path, world=world, timeout=200) for world in (1, 2))
    assert f"|{metric}" in one[0].replace(" ", "")
    assert two == [one[0], ""]


def _stream(folder: str, replica: int) -> Any:
    from datasets import load_dataset
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    stream = load_dataset("json", data_files=f"{folder}/texts.jsonl", split="train", streaming=True, cache_dir=folder)
    stream = split_dataset_by_node(stream, rank=replica, world_size=2).with_format("torch")
    return StatefulDataLoader(stream, batch_size=2)


def _train(folder: str, tp: int, until: int | None) -> list[Any]:
    """Return the numbers and the loss of each step; stop after ``until``, or go on from there."""
    replica = dist.get_rank() // tp
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    model = shardcore.shard(transformers.LlamaForCausalLM(config), tp=tp, dp=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = _stream(folder, replica)
    if until is None:
        shardcore.load_checkpoint(f"{folder}/run", model, optimizer, loader=loader)
    seen = []
    for step, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = model(input_ids=batch["ids"], labels=batch["ids"]).loss
        loss.backward()
        optimizer.step()
        seen.append((batch["number"].tolist(), loss.item()))
        if step == until:
            shardcore.save_checkpoint(f"{folder}/run", model, optimizer, step=step, loader=loader)
    return seen


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # torchdata calls what torch deprecates
@pytest.mark.parametrize("tp", [1, 2])
def test_a_stream_goes_on_with_the_next_item(pool, tmp_path, tp):
    pytest.importorskip("datasets")
    pytest.importorskip("torchdata")
    rows = [{"number": number, "ids": [number % 40 + 1] * 6} for number in range(28)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    whole = pool.run(_train, str(tmp_path), tp, 3, world=2 * tp, timeout=200)
    rest = pool.run(_train, str(tmp_path), tp, None, world=2 * tp, timeout=200)
    assert [len(seen) for seen in whole] == [7] * 2 * tp
    assert rest == [seen[3:] for seen in whole]
    assert sorted(n for seen in whole[::tp] for numbers, _ in seen for n in numbers) == list(range(28))
