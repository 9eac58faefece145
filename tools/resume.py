"""Kills a training at random instants, lets it go on, and compares its curve with that of one that nobody killed.

``python tools/resume.py [--steps N] [--seed N]``, or ``python -m nox -s resume``. What is trained is
`examples/finetune.py`, from weights that `examples/pretrain.py` has left after a few steps. Twice it is interrupted
five times: four times a random rank is killed with SIGKILL, at a random instant of a random step (in evaluations and
checkpoints too), and torchrun's elastic restart starts all ranks again; once torchrun gets SIGTERM, upon which all
ranks save and end, and torchrun is started anew.

1. On one mesh, tp 2, with dropout, in float32: every number of the log is equal, bit for bit.
2. From tp 2 to two replicas after SIGTERM, without dropout, in float64: all numbers are within `BOUND`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Training", "compare", "interrupted", "main", "pretrained", "uninterrupted"]

EXAMPLES = Path(__file__).parents[1] / "examples"
BOUND = 1e-12  # relative, between two meshes in float64
LIMIT = 300.0  # seconds for one training to go on
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Training:
    """A training of `examples/finetune.py` on two ranks.

    Attributes:
        model: the weights that it begins with.
        output: its folder.
        steps: how many it takes.
        options: further flags.
    """

    model: Path
    output: Path
    steps: int
    options: tuple[str, ...] = ()

    def start(self, tp: int, restarts: int = 0) -> subprocess.Popen[str]:
        """Start torchrun for two ranks, ``tp`` of which share a model; what it prints goes to a file."""
        flags = {"model": self.model, "output": self.output, "steps": self.steps, "tp": tp}
        often = {"log-every": 1, "save-every": 3, "evaluate-every": max(2, self.steps // 2), "warm-up": 3}
        given = [text for name, value in {**flags, **often}.items() for text in (f"--{name}", str(value))]
        return _torchrun(self.output, "finetune.py", (*given, *self.options), f"--max-restarts={restarts}")

    def reached(self) -> int:
        """Return the last step that the log has."""
        return max((int(entry["step"]) for entry in _entries(self.output)), default=0)

    def starts(self) -> int:
        """Return how often the ranks were started, as far as they came to begin."""
        return (self.output / "printed").read_text(encoding="utf-8").count(", from step ")

    def curve(self) -> dict[tuple[int, str], float]:
        """Return every number that does not depend on the machine, by step and name.

        Raises:
            SystemExit: a step is missing, or is there twice.
        """
        values: dict[tuple[int, str], float] = {}
        for entry in _entries(self.output):
            for name in entry.keys() & {"loss", "gradient_norm", "lr", "accuracy"}:
                if (key := (int(entry["step"]), name)) in values:
                    raise SystemExit(f"{self.output}/log.jsonl has step {key[0]} twice")
                values[key] = entry[name]
        taken = sorted(step for step, name in values if name == "loss")
        if taken != list(range(1, self.steps + 1)):
            raise SystemExit(f"{self.output}/log.jsonl has the steps {taken}, wanted 1 to {self.steps}")
        return values


def _entries(output: Path) -> list[dict[str, float]]:
    """Return the lines of a log that are whole."""
    try:
        lines = (output / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def _torchrun(output: Path, script: str, flags: Sequence[str], *options: str) -> subprocess.Popen[str]:
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    with (output / "printed").open("a", encoding="utf-8") as printed:
        return subprocess.Popen(
            [*command, str(EXAMPLES / script), *flags],
            env=env,
            stdout=printed,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[str], output: Path, wanted: bool = True) -> None:
    """Wait for the end of torchrun, and for success if it is ``wanted``."""
    try:
        code = process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        _kill_all(process)
        raise SystemExit(f"not done after {LIMIT:g} s:\n{_printed(output)}") from None
    if wanted and code:
        raise SystemExit(f"the training failed:\n{_printed(output)}")


def _kill_all(process: subprocess.Popen[str]) -> None:
    process.terminate()  # unlike a kill, it lets torchrun stop its ranks
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _printed(output: Path) -> str:
    return (output / "printed").read_text(encoding="utf-8")[-6000:]


def pretrained(folder: Path, steps: int = 5) -> Path:
    """Return the folder of a small model that was trained for a few steps."""
    flags = ["--output", str(folder), "--hidden", "64", "--layers", "2", "--length", "64", "--warm-up", "1"]
    process = _torchrun(folder, "pretrain.py", [*flags, "--steps", str(steps), "--tp", "2"])
    _end(process, folder)
    return folder / "model"


def uninterrupted(training: Training, tp: int) -> dict[tuple[int, str], float]:
    """Train without a pause and return the curve."""
    _end(training.start(tp), training.output)
    return training.curve()


def interrupted(
    training: Training, meshes: tuple[int, int], draws: random.Random, kills: int = 4
) -> dict[tuple[int, str], float]:
    """Train, killed ``kills`` times and told to end once, and return the curve.

    Args:
        training: what is trained; each interruption has its part of the steps.
        meshes: ``tp`` before SIGTERM, and after it.
        draws: of the instants and of the ranks.
        kills: how often a rank is killed.

    Raises:
        SystemExit: it did not go on, or did not end.
    """
    part = training.steps // (kills + 1)
    told = draws.randrange(1, kills) if kills > 1 else 0  # so that ranks are killed on both meshes
    process = training.start(meshes[0], restarts=kills)
    for number in range(kills + 1):
        _wait_for(training, process, draws.randrange(number * part, (number + 1) * part), starts=number + 1)
        time.sleep(draws.uniform(0.0, 0.3))
        if number == told:
            process.terminate()
            _end(process, training.output, wanted=False)
            print(f"  SIGTERM in step {training.reached()}", flush=True)
            process = training.start(meshes[1], restarts=kills)
        else:
            victim = draws.choice(_ranks(process))
            os.kill(victim, signal.SIGKILL)
            print(f"  SIGKILL of a rank after step {training.reached()}", flush=True)
    _end(process, training.output)
    if (starts := training.starts()) != kills + 2:
        raise SystemExit(f"the ranks began {starts} times, wanted {kills + 2}:\n{_printed(training.output)}")
    return training.curve()


def _wait_for(training: Training, process: subprocess.Popen[str], step: int, starts: int) -> None:
    """Wait until the ranks have begun ``starts`` times and then have taken a ``step``."""
    end = time.monotonic() + LIMIT
    while training.starts() < starts or training.reached() < step:
        if process.poll() is not None or time.monotonic() > end:
            _kill_all(process)
            raise SystemExit(f"step {step} was not reached:\n{_printed(training.output)}")
        time.sleep(_POLL)


def _ranks(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in children.read_text().split()]


def compare(found: dict[tuple[int, str], float], wanted: dict[tuple[int, str], float], bound: float) -> float:
    """Return the largest relative difference of two curves.

    Raises:
        SystemExit: it is above ``bound``; or the curves have other entries.
    """
    if found.keys() != wanted.keys():
        raise SystemExit(f"the curves have other entries: {sorted(found.keys() ^ wanted.keys())}")
    apart = {key: abs(found[key] - value) / (abs(value) or 1.0) for key, value in wanted.items()}
    worst = max(apart, key=lambda key: (apart[key] != apart[key], apart[key]))
    if not apart[worst] <= bound:
        step, name = worst
        raise SystemExit(f"{name} of step {step} is {found[worst]!r}, wanted {wanted[worst]!r} (bound {bound:g})")
    return apart[worst]


def main() -> None:
    """Do both comparisons and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of each training [30]")
    parser.add_argument("--seed", type=int, default=None, help="of the instants [drawn]")
    given = parser.parse_args()
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    draws = random.Random(seed)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = pretrained(folder / "pretrained")
        cases = (
            ("tp 2, with dropout, float32", (2, 2), ("--dropout", "0.1"), 0.0),
            ("tp 2, then 2 replicas, float64", (2, 1), ("--dropout", "0.0", "--precision", "float64"), BOUND),
        )
        for at, (what, meshes, options, bound) in enumerate(cases):
            print(what, flush=True)
            wanted = uninterrupted(Training(model, folder / f"{at}-whole", given.steps, options), meshes[0])
            training = Training(model, folder / f"{at}-killed", given.steps, options)
            apart = compare(interrupted(training, meshes, draws), wanted, bound)
            print(f"  {len(wanted)} numbers of {given.steps} steps: {apart:.1e} apart, allowed {bound:g}", flush=True)


if __name__ == "__main__":
    main()
