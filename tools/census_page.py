"""The page of the census: what was measured, in words and in tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from census_ranks import WAYS  # from tools/

__all__ = ["counted", "page", "shortened", "totals"]

_MOST = 0.5  # of the parameters of attention modules
_HEADER = """# Census of transformers

Model classes with a head in transformers {release}, with few layers and random float64 weights, sharded over two
tensor-parallel ranks beside the same model unsharded. What is compared is the loss, every output and every gradient of
one call. A class that no pack serves is sharded by `policy="infer"`, whose policy is found on a copy of other sizes
than those of the model that is compared, where a copy of other sizes can be called. The proof that `infer` runs by
default is not part of it: it trains too, and refuses some of these classes.

{totals}

* **way**: the pack that serves the class, or `inferred`; *text* where the class takes images or sounds too, and no call
  with them is known to the tool: what only they reach is whole on each rank.
* **error**: the largest difference, relative to the largest gradient, or to the loss.
* **split**: the share of the small model's parameters of which a rank holds a part; **attention**: the same of those
  that attention modules hold. Tables are large in small models: these shares say little of a large one.
* **sequence**: with sequence parallelism too; **pipeline**: as two stages, not split; **lazy**: `from_pretrained`, of
  which each rank reads its parts; **save**: what transformers reads from a checkpoint of the sharded model;
  **generate**: the same tokens. Empty where there is nothing to compare, *no* where it is refused in words, see below.

`nox -s census` measures the classes that are missing here, and writes this page.
"""
_STATES = {
    "exact": "are exact",
    "differs": "differ",
    "refused": "are refused with a reason before anything is changed",
    "no library": "need a library that is not installed here",
    "not built": "could not be built or called here",
    "random": "draw numbers or round so much that two calls of the unsharded model differ",
    "failed": "ended otherwise, as the table says",
}
_SHORT = 240  # characters of a reason


def totals(results: Mapping[str, Mapping[str, Any]], missing: int) -> str:
    """Return the numbers in words; ``missing`` classes have no result."""
    exact = [result for result in results.values() if result["state"] == "exact"]
    attending = [result for result in exact if result["attention"] is not None]
    split = sum(result["attention"] > _MOST for result in attending)
    inferred = sum(result["way"].startswith("inferred") for result in exact)
    mixing = [result for result in results.values() if result.get("blocks") is not False]
    of_blocks = sum(result["state"] == "exact" for result in mixing)
    return (
        f"Of {len(results) + missing} classes {len(results)} were measured: {counted(results.values())}; {missing} "
        f"were not reached. Of the {len(exact)} exact ones {inferred} have no pack; of the {len(attending)} with "
        f"attention modules {split} ({split / max(len(attending), 1):.0%}) have more than half of their parameters "
        f"split.{_ways(exact)}\n\n"
        f"{len(mixing)} of the classes have a transformer's blocks: attention, or what mixes tokens in its place. Of "
        f"these {of_blocks / max(len(mixing), 1):.1%} are exact: {counted(mixing)}. The others are convolutions "
        "throughout, of which tensor parallelism splits little or nothing."
    )


def counted(results: Iterable[Mapping[str, Any]]) -> str:
    """Return how many results are in each state, in words."""
    counts = Counter(result["state"] for result in results)
    return ", ".join(
        f"{counts[state]} {words}" for state, words in _STATES.items() if counts[state] or state == "differs"
    )


def _ways(exact: Sequence[Mapping[str, Any]]) -> str:
    said = []
    for way in WAYS:
        tried = [each for result in exact if (each := result["ways"].get(way, "").partition(":")[0])]
        said.append(f"{way} {tried.count('exact')} of {len(tried)} ({tried.count('differs')} differ)" if tried else "")
    return f" Of these are exact in further ways: {', '.join(filter(None, said))}." if any(said) else ""


def page(
    results: Mapping[str, Mapping[str, Any]],
    missing: int,
    release: str,
    also: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> str:
    """Return the page: the totals, also those of another release, a row for each class, and why some are not exact."""
    said = totals(results, missing)
    if also:
        said += f"\n\nWith transformers {next(iter(also.values()))['release']}: {totals(also, 0)}"
    lines = [_HEADER.format(release=release, totals=said)]
    lines += ["| class | way | error | split | attention | " + " | ".join(WAYS) + " |", "|---" * (5 + len(WAYS)) + "|"]
    others = ["", "## Not exact", "", "| class | way | | why |", "|---" * 4 + "|"]
    for name, result in sorted(results.items()):
        way = result.get("way", "")
        if result["state"] == "exact":
            attention = "" if result["attention"] is None else f"{result['attention']:.2f}"
            row = [f"`{name}`", way, f"{result['error']:.0e}", f"{result['split']:.2f}", attention]
            lines.append(f"| {' | '.join(row + [_cell(result['ways'][each]) for each in WAYS])} |")
        else:
            others.append(f"| `{name}` | {way} | {result['state']} | `{shortened(result['reason'])}` |")
    return "\n".join([*lines, *others, "", *_in_part(results), ""])


def _cell(said: str) -> str:
    return {"exact": "yes", "": "", "refused": "no"}.get(said.partition(":")[0], f"**{said.partition(':')[0]}**")


def _in_part(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield why classes that are exact are not so in some way, the most frequent reason of each way first."""
    yield from ("## Not in every way", "", "| | classes | such as | why |", "|---" * 4 + "|")
    for way in WAYS:
        found: dict[str, list[str]] = {}
        for name, result in sorted(results.items()):
            said = result.get("ways", {}).get(way, "")
            if said not in ("", "exact"):
                found.setdefault(shortened(said.replace(name, "it")), []).append(name)
        for why, names in sorted(found.items(), key=lambda each: -len(each[1])):
            yield f"| {way} | {len(names)} | `{names[0]}` | `{why}` |"


def shortened(reason: str) -> str:
    """Return the beginning of a reason, for a cell."""
    why = " ".join(reason.split()).replace("|", "/").replace("`", "")
    return why if len(why) <= _SHORT else f"{why[:_SHORT]} ..."
