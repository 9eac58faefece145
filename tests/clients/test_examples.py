"""The short examples, which the pages of the guide show, print on two ranks what they print on one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

BEFORE_5 = transformers.__version__.startswith("4.")

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 300  # seconds; each process imports everything first
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def printed(folder: Path, script: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    """Run a script in a folder of its own; return what it prints."""
    folder.mkdir()
    process = start(folder, *launcher, str(EXAMPLES / script), *arguments)
    try:
        text, errors = process.communicate(timeout=LIMIT)
    finally:
        process.terminate()  # unlike a kill, it lets torchrun stop its ranks
    assert process.returncode == 0, text + errors
    return text


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\bloss'?:? '?([\d.]+)", text)]


@pytest.mark.nightly
def test_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    wanted = losses(printed(tmp_path / "one", "trainer.py", "--steps", "10"))
    got = losses(printed(tmp_path / "two", "trainer.py", "--steps", "10", "--tp", "2", launcher=TORCHRUN))
    assert len(wanted) == 3
    assert got == pytest.approx(wanted, abs=2e-3)
    saved = {path.name for path in (tmp_path / "two" / "runs" / "trainer" / "model").iterdir()}
    assert {"config.json", "model.safetensors"} <= saved


def script(name: str, *arguments: str, folder: Path) -> str:
    """Run a script on the rank that this is; return what it prints."""
    out = io.StringIO()
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.fixture
def call(pool, tmp_path):
    """Return a function that runs a script on ranks that are already there."""

    def on_ranks(name: str, *arguments: str, world: int) -> str:
        return pool.run(script, name, *arguments, folder=tmp_path, world=world, timeout=100)[0]

    return on_ranks


libraries = pytest.mark.filterwarnings(
    *(f"ignore::{kind}" for kind in ("FutureWarning", "DeprecationWarning", "UserWarning"))
)  # about their own settings


@libraries
def test_adapters_are_trained_merged_and_loaded_alone(call, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    call("small.py", "llama", "llama", world=1)
    flags = ("--model", "llama", "--data", "llama/texts.txt", "--dtype", "float32", "--steps", "6", "--lr", "1e-2")
    wanted = losses(call("lora.py", *flags, "--output", "one", world=1))
    text = call("lora.py", *flags, "--output", "two", world=2)
    assert len(wanted) == 6
    assert wanted[-1] < wanted[0] - 0.05
    assert losses(text) == pytest.approx(wanted, abs=2e-3)
    assert "plain transformers continues with the same tokens" in text
    base, merged = (LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("llama", "two/merged"))
    alone = peft.PeftModel.from_pretrained(base, tmp_path / "two" / "adapter").merge_and_unload()
    for (name, one), (_, other) in zip(alone.named_parameters(), merged.named_parameters(), strict=True):
        assert (one - other).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    "meshes",
    [((2, 2), (1, 1)), pytest.param(((2, 2), (4, 2), (1, 1)), marks=pytest.mark.nightly)],
    ids=["on-one", "on-four-then-on-one"],
)
def test_a_training_goes_on_on_another_number_of_ranks(call, meshes):
    wanted = losses(call("resume.py", "--output", "whole", "--until", str(3 * len(meshes)), world=1))
    assert len(wanted) == 3 * len(meshes)
    got = []
    for number, (ranks, tp) in enumerate(meshes, 1):
        text = call("resume.py", "--tp", str(tp), "--until", str(3 * number), world=ranks)
        assert f"{3 * (number - 1)} steps are done; tp {tp} x dp {ranks // tp}" in text
        got += losses(text)
    assert got == pytest.approx(wanted, abs=2e-4)


@libraries
@pytest.mark.nightly
def test_images_that_are_arrays(call):
    pytest.importorskip("sklearn")
    call("small.py", "vit", "vit", world=1)
    one, two = (call("vision.py", "--model", "vit", "--steps", "100", world=ranks) for ranks in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
    right = re.search(r"not seen: ([\d.]+)%", two)
    assert right is not None
    assert float(right[1]) > 50  # of ten digits
    assert "judges 0 of them otherwise" in two


@libraries
@pytest.mark.nightly
@pytest.mark.skipif(BEFORE_5, reason="a tokenizer of Whisper takes files alone before transformers 5")
def test_sound_that_is_made(call):
    call("small.py", "whisper", "whisper", world=1)
    one, two = (call("speech.py", "--model", "whisper", "--steps", "150", world=ranks) for ranks in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=2e-2)
    right = re.search(r"written down right: (\d+) of 32", two)
    assert right is not None
    assert int(right[1]) > 16  # of 343 melodies
    assert "writes 0 of them otherwise" in two


@pytest.mark.nightly
def test_the_server(tmp_path):
    process = start(tmp_path, *TORCHRUN, str(EXAMPLES / "serve.py"), "--port", "0", "--tokens", "5")
    try:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        answers = []
        for _ in range(2):
            with urllib.request.urlopen(address[0], data=b"The import system", timeout=60) as reply:
                answers.append(reply.read())
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert len(answers[0]) == 5
    assert answers[0] == answers[1]
