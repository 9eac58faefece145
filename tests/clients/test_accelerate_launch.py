"""The script of the guide, started by ``accelerate launch``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_docs import DOCS, _blocks

LIMIT = 300  # seconds; each process imports everything first

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the script needs transformers"
)


def script(tp: int) -> str:
    """The first block of the page, and that of Accelerate, which prints its losses."""
    code = [code for language, code, _ in _blocks(DOCS / "trainer.md") if language == "python"]
    (loop,) = (block for block in code if "shardcore_trainer.accelerate import Accelerator" in block)
    assert loop.count("tp=2") == 1
    loop = loop.replace("tp=2", f"tp={tp}").replace("shuffle=True", "shuffle=False")
    said = "        accelerator.backward(loss)\n"
    assert loop.count(said) == 1
    return code[0] + loop.replace(said, said + "        accelerator.print('loss', loss.item())\n")


def run(folder: Path, tp: int, *launcher: str) -> tuple[int, list[float], str]:
    """Start the script; return its status, the losses it printed, and what it said."""
    folder.mkdir()
    (folder / "script.py").write_text(script(tp))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *(("-m", "accelerate.commands.launch", *launcher) if launcher else ()), "script.py"]
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    losses = [float(line.split()[1]) for line in found.stdout.splitlines() if line.startswith("loss ")]
    return found.returncode, losses, found.stdout + found.stderr


@pytest.mark.nightly
def test_two_ranks_print_the_losses_of_one_process(tmp_path):
    status, wanted, said = run(tmp_path / "one", 1)
    assert status == 0, said
    assert len(wanted) == 3
    launcher = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    status, losses, said = run(tmp_path / "two", 2, *launcher)
    assert status == 0, said
    assert losses == pytest.approx(wanted, rel=1e-6)


@pytest.mark.nightly
def test_one_process_in_place_of_two_is_told(tmp_path):
    """``accelerate launch --cpu`` starts one process, whatever number it is given."""
    status, losses, said = run(tmp_path / "two", 2, "--cpu", "--num_processes", "2")
    assert status != 0
    assert not losses
    assert "sharding over 2 ranks needs that many processes, and this one was started alone" in said
