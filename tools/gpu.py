"""The conformance kit on the cards of this machine, in parts: ``nox -s gpu``, or this file where torch and packs are.

    python tools/gpu.py                               # every part, as many at a time as there are cores for
    python tools/gpu.py kit-1 kit-2 --results FOLDER  # some; a part that passed with the same sources is passed over

The kit's quick run at two ranks, NCCL between them, in float64 and with the bounds that it has on CPUs. Ranks share the
cards if there are fewer: that is right, and slow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

from cells import Pack, find_packs  # from tools/
from results import Result, Results, digest_of

ROOT = Path(__file__).parents[1]
#: How many parts the packs are dealt out to; in a part, a mechanism is tried once.
_PARTS = 5
_CORES = 3  # of a part: two ranks, and the process that asks them

__all__ = ["main", "parts"]


def parts() -> dict[str, list[Path]]:
    """Return the tests of each part; packs with many lie in different ones, and those for a newer torch in none."""
    packs = filter(_fits, find_packs(ROOT))
    kits = sorted((pack.folder / "tests" / "test_conformance.py" for pack in packs), key=_weight)
    return {f"kit-{index + 1}": kits[index::_PARTS] for index in range(_PARTS)}


def _fits(pack: Pack) -> bool:
    needed = map(Requirement, pack.dependencies)
    return all(r.specifier.contains(version(r.name), prereleases=True) for r in needed if r.name == "torch")


def _weight(kit: Path) -> int:
    return sum(len(file.read_text()) for file in kit.parents[1].glob("src/*/cases.py"))


def _run(part: str, tests: Sequence[Path], device: str, results: Results) -> Result:
    """Run a part, unless it passed before, and keep its result."""
    sources = f"{digest_of([ROOT / 'shardcore' / 'src', ROOT / 'packs'])} {device}"
    name = f"{device}-{part}"
    if results.passed_before(name, sources):
        return next(result for result in results.all() if result.name == name)
    report, lines = (results.folder / f"{name}.{end}" for end in ("xml", "jsonl"))
    for file in (report, lines):
        file.unlink(missing_ok=True)
    written = [f"--junitxml={report}", "-p", "outcomes", f"--outcomes={lines}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "--quick", f"--device={device}", *written, *map(str, tests)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT / "tools"))))
    start = time.monotonic()
    with (results.folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    result = Result.of(
        report,
        success=done.returncode == 0,
        seconds=time.monotonic() - start,
        lines=lines,
        name=name,
        suite=part,
        against=device,
        sources=sources,
    )
    results.write(result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts from the command line; the exit status is 1 if a test failed."""
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(known)} (default: all)")
    parser.add_argument("--device", default="cuda", help="what ranks compute on (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // _CORES), help="parts at a time")
    folder = ROOT / ".nox" / "results"
    parser.add_argument("--results", type=Path, default=folder, help="where results are kept (default: .nox/results)")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    given.results.mkdir(parents=True, exist_ok=True)
    results, failed = Results(given.results.resolve()), 0
    with ThreadPoolExecutor(given.jobs) as several:
        asked = [several.submit(_run, part, known[part], given.device, results) for part in given.parts or known]
        for each in asked:
            result = each.result()
            failed += result.failed
            print(f"{result.name}: {result}, {result.seconds:.0f} s", flush=True)
            for test, why in result.failures.items():
                print(f"    {test}: {why}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
