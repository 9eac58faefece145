"""Write docs/exactness.md: how far each family is from the unsharded model, in every way to split it.

    python tools/exactness.py                       # print what the libraries that are installed here come to
    python tools/exactness.py --write               # into docs/exactness.md, beside what other releases came to
    python tools/exactness.py --packs llama --tp 2

Each family (class of configuration) of a pack that is tested with the installed release is measured by the first of its
conformance cases. Needs the packs installed, and minutes: every number is that of a small model that is trained
next to its sharded copy on that many processes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cells import Pack, find_packs  # from tools/
from shardcore_testing.cases import Case
from shardcore_testing.checks import examine
from shardcore_testing.findings import Finding
from shardcore_testing.pool import WorkerPool
from shardcore_testing.subject import Subject, cases_of, registry_of

__all__ = ["Row", "main", "page"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "exactness.md"

_HEADER = """# How exact it is

How far a sharded model is from the unsharded one, for every family and every way to split it. A small model with random
weights is trained for two steps in float64 next to its sharded copy; a number is the largest relative difference of any
output, loss, gradient of a parameter, norm of all gradients, and parameter after a step of AdamW. Where models compute
in float32 by themselves (norms, softmaxes, losses), they compute in float64 here. The bound of the
[conformance kit](reference/testing.md) is 1e-12.

* **tp 2, 3, 4**: so many tensor-parallel ranks; 3 where heads may be unequal on the ranks.
* **sequence**: two ranks, activations between regions split along the sequence.
* **split loss**: two ranks, logits split over the vocabulary up to the loss.
* **replicas**: two replicas of one rank each, with batches of their own.
* **experts**: two replicas of two tensor-parallel ranks each, which share the experts of a mixture.

An empty cell is what a family does not have or does not support: [Models](models.md) says which.
`python tools/exactness.py --write` writes this page.
"""
_COLUMNS = ("family", "tp 2", "tp 3", "tp 4", "sequence", "split loss", "replicas", "experts")
_SIZES = (2, 3, 4)
_LIMIT = 300.0  # seconds


@dataclass(frozen=True)
class Row:
    """What one family came to."""

    family: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {' | '.join((self.family, *self.cells))} |"


def rows_of(pack: Pack, pool: WorkerPool, sizes: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each family that a pack serves with the libraries that are installed."""
    plugin = f"{pack.name.replace('-', '_')}.plugin"
    cases = cases_of(registry_of(plugin).packs[0].cases)
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(_family(case), case)
    for family, case in first.items():
        yield Row(family, tuple(_cells(case, plugin, pool, sizes)))


def _family(case: Case) -> str:
    model = case.build()
    config = getattr(model, "config", None)
    return type(model).__name__ if config is None else type(config).__name__.removesuffix("Config")


def _cells(case: Case, plugin: str, pool: WorkerPool, sizes: Sequence[int]) -> Iterator[str]:
    def worst(section: str, tp: int) -> str:
        subject = Subject(case=case, tp=tp, plugin=plugin)
        return _worst(examine(pool, subject, section, timeout=_LIMIT))

    for size in _SIZES:
        yield worst("training", size) if size in case.supports.tensor_parallel and size in sizes else ""
    smallest = min((size for size in case.supports.tensor_parallel if size > 1), default=1)
    yield worst("sequence", smallest) if case.supports.sequence else ""
    yield worst("split logits", smallest)
    yield worst("data parallel", 1)
    yield worst("experts", smallest) if case.supports.experts is True else ""


def _worst(findings: Sequence[Finding]) -> str:
    """Return the largest error of several findings, or that one of them failed."""
    if failed := [finding for finding in findings if finding.state == "failed"]:
        print(failed[0].check, failed[0].message, file=sys.stderr)
        return "failed"
    errors = [finding.error for finding in findings if finding.error is not None]
    return f"{max(errors):.0e}".replace("0e+00", "0") if errors else ""


def _releases(library: str) -> str:
    versions = (f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in (library, "torch"))
    return ", ".join(versions)


def page(rows: Sequence[Row], title: str, before: str = "") -> str:
    """Return the page, with the sections of other releases, and families that were not measured, as in ``before``."""
    parts = re.split(r"^## (.+)\n", before, flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    known = {line.split(" | ")[0]: line for line in sections.get(title, "").splitlines()[3:]}
    known |= {str(row).split(" | ")[0]: str(row) for row in rows}
    lines = ["", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *known.values(), ""]
    sections[title] = "\n".join(lines)
    newest_first = sorted(sections, key=lambda name: [int(n) for n in re.findall(r"\d+", name)], reverse=True)
    return _HEADER + "".join(f"\n## {name}\n{sections[name].rstrip()}\n" for name in newest_first)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--packs", nargs="+", help="these alone, by their short names")
    parser.add_argument("--tp", nargs="+", type=int, default=_SIZES, help="numbers of tensor-parallel ranks")
    parser.add_argument("--library", default="transformers", help="whose release names the section")
    given = parser.parse_args(arguments)
    release = importlib.metadata.version(given.library)
    packs = [pack for pack in find_packs(ROOT) if release in pack.matrix.get(given.library, ())]
    packs = [pack for pack in packs if given.packs is None or pack.name.removeprefix("shard-") in given.packs]
    rows = []
    with WorkerPool(4, collective_timeout=120.0) as pool:
        for pack in packs:
            for row in rows_of(pack, pool, given.tp):
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    text = page(rows, _releases(given.library), PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    if given.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
