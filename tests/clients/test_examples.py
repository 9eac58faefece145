"""The short examples print on two ranks what they print on one, and the server answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")

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


@pytest.mark.nightly
def test_adapters(tmp_path):
    pytest.importorskip("peft")
    wanted = losses(printed(tmp_path / "one", "lora.py", "--steps", "4"))
    text = printed(tmp_path / "two", "lora.py", "--steps", "4", launcher=TORCHRUN)
    assert len(wanted) == 4
    assert wanted[-1] < wanted[0]
    assert losses(text) == pytest.approx(wanted, abs=2e-3)
    # The adapters that two ranks saved, loaded by PEFT alone in a copy that was never sharded.
    apart = re.search(r"logits differ by (\S+) at most", text)
    assert apart is not None
    assert float(apart[1]) < 1e-4


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
