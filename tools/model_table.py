"""Write MODELS.md: every class that the packs of this workspace serve, and what its conformance cases hold it to.

    python tools/model_table.py            # print the page
    python tools/model_table.py --write    # into MODELS.md

Needs the packs installed, and every library they serve: a class whose library is not here is left as it is in the page.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from cells import Pack, find_packs  # from tools/
from shardcore.plugins.versions import is_met
from shardcore_testing.cases import Case
from shardcore_testing.subject import Subject, cases_of, meta_copy, registry_of

__all__ = ["Row", "page", "rows_of"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "MODELS.md"
#: What there is to know of a pack beyond its table stands here, under its name.
FAMILIES = ROOT / "docs" / "families.md"

_HEADER = """# Models

Every class that the packs of this repository serve, and what each supports: `tp` sizes, sequence and context
parallelism, split losses, generation, recomputation. The conformance kit tests every mark.

* **tp**: the numbers of tensor-parallel ranks, besides 1, at which its tiny models are compared with unsharded ones.
  3 is among them where heads may be unequal on the ranks; else the ranks divide the heads.
* **seq**: `enable_sequence_parallelism=True`.
* **cp**: `context_parallel_size`, with transformers 5.24; [how](docs/long-contexts.md).
* **loss**: `parallel_output=True` and `loss_chunk_size`, for classes with a head over a vocabulary.
* **gen**: `generate`.
* **rec**: `gradient_checkpointing_enable`; ✓ with both values of `use_reentrant`.
* **out**: what can be asked for besides the usual outputs: **A** attentions and **H** hidden states (in
  encoder-decoders those of the decoder), **E** the encoder's attentions, **C** cross-attentions, **R** router logits.
* **sent**: the most collectives that one more block costs, forward+backward. Attention and MLP cost 2+2,
  cross-attention 1+1; one more each way where ranks share KV heads. Each further one backward sums gradients of what
  ranks hold whole inside of a region: the bias of a fused projection, norms of queries and keys, latent projections,
  the router of a mixture, tables of positions.

An empty cell is what a class does not have, or what is refused. Subclasses of these classes are found too. Classes with
linears that several projections share need torch 2.12, which is required by {needing};
with torch 2.11 the mixtures of experts of transformers 5 are refused before anything is changed.

Everything else that the kit checks (gradients, optimizer steps, clipping, data parallelism, checkpoints, loading) holds
for every class: [Testing](docs/reference/testing.md). `python tools/model_table.py --write` writes this page from the
packs' own cases.
"""
_COLUMNS = ("class", "tp", "seq", "cp", "loss", "gen", "rec", "out", "sent")
_OUTPUTS = {
    "attentions": "A",
    "decoder_attentions": "A",
    "hidden_states": "H",
    "decoder_hidden_states": "H",
    "encoder_attentions": "E",
    "cross_attentions": "C",
    "router_logits": "R",
}


@dataclass(frozen=True)
class Row:
    """What the cases of one class say."""

    library: str
    name: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {' | '.join((f'`{self.name}`', *self.cells))} |"


def rows_of(pack: Pack) -> list[Row]:
    """Return a row for each class that a pack serves, as far as its library is installed."""
    plugin = f"{pack.name.replace('-', '_')}.plugin"
    found = registry_of(plugin).packs[0]
    cases: dict[str, list[tuple[Case, Any]]] = {}
    for case in cases_of(found.cases):
        model = case.build()
        cases.setdefault(f"{type(model).__module__}.{type(model).__qualname__}", []).append((case, model))
    targets = dict.fromkeys(spec.target for spec in found.specs if is_met(spec.requires))
    rows = (
        (target, [case for name in cases if fnmatchcase(name, target) for case in cases[name]]) for target in targets
    )
    return [_row(target, own, plugin) for target, own in rows if own]


def _row(target: str, cases: Sequence[tuple[Case, Any]], plugin: str) -> Row:
    supports = [case.supports for case, _ in cases]
    sizes = sorted({size for s in supports for size in s.tensor_parallel if size > 1})
    outputs = {_OUTPUTS.get(name, name) for s in supports for name in s.captured}
    kinds = {(s.checkpointing, s.checkpointing and s.reentrant) for s in supports}
    cells = (
        " ".join(map(str, sizes)),
        _yes(any(s.sequence for s in supports)),
        _yes(any(s.context for s in supports)),
        _yes(any(_splits_logits(case, model, plugin) for case, model in cases)),
        _yes(any(s.generation for s in supports)),
        "✓" if (True, True) in kinds else "`False`" if (True, False) in kinds else "",
        " ".join(sorted(outputs)),
        "+".join(map(str, cases[0][0].collectives)),
    )
    return Row(*_library_and_name(target), cells)


def _library_and_name(target: str) -> tuple[str, str]:
    """Return the first and the last part of a name; remote code has the library that loads it."""
    return target.partition(".")[0].removesuffix("_modules"), target.rpartition(".")[2]


def _splits_logits(case: Case, model: Any, plugin: str) -> bool:
    tp = min((size for size in case.supports.tensor_parallel if size > 1), default=1)
    plan = Subject(case=case, tp=tp, plugin=plugin, fields={"parallel_output": True}).plan(meta_copy(model))
    return any(step.splits_logits for step in plan.steps)


def _yes(holds: bool) -> str:
    return "✓" if holds else ""


def page(packs: Sequence[Pack], before: str = "") -> str:
    """Return the page.

    Args:
        packs: the packs.
        before: the page as it is, of which the rows of libraries that are not installed are kept.
    """
    needing = ", ".join(f"`{pack.name}`" for pack in packs if "torch>=2.12" in pack.dependencies)
    header = _HEADER.replace("{needing}", needing)
    return "\n".join([header, *(line for pack in packs for line in _section(pack, before))])


def _section(pack: Pack, before: str) -> Iterator[str]:
    kept = before.partition(f"\n## {pack.name}\n")[2].partition("\n## ")[0].splitlines()
    rows = rows_of(pack)
    yield f"## {pack.name}"
    yield ""
    yield "; ".join(f"{library} {', '.join(releases)}" for library, releases in pack.matrix.items())
    yield from _exceptions(pack)
    if f"\n## {pack.name}\n" in FAMILIES.read_text(encoding="utf-8"):
        yield ""
        yield f"[What to know](docs/families.md#{pack.name})"
    for library in pack.matrix:
        yield ""
        yield f"| {' | '.join(library if name == 'class' else name for name in _COLUMNS)} |"
        yield f"|{'---|' * len(_COLUMNS)}"
        if _is_here(library):
            yield from map(str, (row for row in rows if row.library == library))
        else:
            yield from _rows_below(kept, library)
    yield ""


def _exceptions(pack: Pack) -> Iterator[str]:
    """Yield a paragraph for each list of releases, of those of the pack, with which some classes are not served."""
    plugin = importlib.import_module(f"{pack.name.replace('-', '_')}.plugin")
    accepted: dict[str, list[str | None]] = {}
    for spec in plugin.shardcore_policies():
        accepted.setdefault(spec.target, []).append(spec.requires)
    left_out: dict[str, list[str]] = {}
    for target, needs in accepted.items():
        library, name = _library_and_name(target)
        without = [r for r in pack.matrix[library] if not any(n is None or _accepts(n, r) for n in needs)]
        if without:
            left_out.setdefault(f"{library} {', '.join(without)}", []).append(f"`{name}`")
    for releases, names in left_out.items():
        yield ""
        yield f"Not with {releases}: {', '.join(names)}."


def _accepts(requirement: str, release: str) -> bool:
    return Requirement(requirement).specifier.contains(release)


def _is_here(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


def _rows_below(kept: Sequence[str], library: str) -> Iterator[str]:
    """Yield the rows of the table whose first column is ``library``."""
    inside = False
    for line in kept:
        if line.startswith(f"| {library} |"):
            inside = True
        elif inside and line.startswith("| "):
            yield line
        elif not line.startswith("|---"):
            inside = False


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write MODELS.md")
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    text = page(find_packs(ROOT), before)
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
