"""What a release of a library changes for all packs, as a table; and the tool that moves the ceiling of `tested`.

    python tools/newest_release.py --raise transformers 5.25.0                 # of all packs
    python tools/newest_release.py --raise transformers 5.25.0 shard-llama     # of one

``nox -s newest-release -- transformers`` installs the newest release of the index beside the newest that is tested,
collects the facts of both (`release_facts`), runs every pack's tests as the quick run does, and the census of what is
new; it writes ``.nox/newest-release/table.md``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

__all__ = ["main", "raised", "table"]

ROOT = Path(__file__).parents[1]
_SHOWN = 4  # names in a cell


def table(
    old: Mapping[str, Any], new: Mapping[str, Any], red: Mapping[str, str], measured: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return what a release changes.

    Args:
        old: the facts of the newest release that is tested.
        new: those of the release that is looked at.
        red: why tests of packs fail with it, by their names.
        measured: what its census has measured, by class.
    """
    lines = [f"# {new['release']} after {old['release']}", ""]
    lines += _section("Tests of packs that fail", ("test", "why"), sorted(red.items()))
    lines += _section("Cases that change", ("case", "what"), _changed(old["cases"], new["cases"]))
    gone = sorted(set(old["classes"]) - set(new["classes"]))
    lines += _section("Classes that are gone", ("class", "model type"), [(name, old["classes"][name]) for name in gone])
    fresh = sorted(set(new["classes"]) - set(old["classes"]))
    rows = [(name, new["classes"][name], _said(measured.get(name))) for name in fresh]
    lines += _section("Classes that are new", ("class", "model type", "census"), rows)
    return "\n".join(lines)


def _section(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return [f"## {title}: none", ""]
    body = [f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in row)} |" for row in rows]
    return [f"## {title}: {len(rows)}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|", *body, ""]


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, "; ".join(said)) for name in sorted({*old, *new}) if (said := list(_differences(name, old, new)))]


def _differences(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if name not in old or name not in new:
        yield "is new" if name in new else "is gone"
        return
    before, after = old[name], new[name]
    if "error" in after:
        if before.get("error") != after["error"]:
            yield f"cannot be planned: {after['error'][:200]}"
        return
    held, holds = before.get("holds", {}), after["holds"]
    for word, names in (
        ("gone", [path for path in held if path not in holds]),
        ("new", [path for path in holds if path not in held]),
        ("of another shape", [path for path in holds if path in held and holds[path] != held[path]]),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{word}: {', '.join(names[:_SHOWN])}{more}"
    if before.get("plan") != after["plan"]:
        yield "another plan"


def _said(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "not measured"
    if result["state"] != "exact":
        return f"{result['state']}: {result['reason'][:120]}"
    return f"exact, {result['way']}, {result['split']:.2f} split"


def raised(metadata: str, library: str, release: str) -> str:
    """Return the metadata of a pack that is tested with ``release`` too: its matrix, and the ceiling of `tested`.

    Raises:
        ValueError: the pack is not tested with the library, or with a newer release already.
    """
    listed = re.search(rf'^{library} = \[(?P<releases>"\d[^\]]*")\]$', metadata, re.MULTILINE)
    ceiling = re.search(rf'"{library}>=(?P<floor>[^,"]+),<(?P<ceiling>[^"]+)"', metadata)
    if listed is None or ceiling is None:
        raise ValueError(f"its metadata has no releases of {library}, or no range of it in `tested`")
    releases = re.findall('"([^"]+)"', listed["releases"])
    newest = max(map(Version, releases))
    if Version(release) <= newest:
        raise ValueError(f"it is tested with {library} {newest} already")
    wanted = Version(release)
    # The next minor release; of a library that counts in micro releases, the next of those.
    parts = ceiling["ceiling"].split(".")
    above = f"{wanted.major}.{wanted.minor + 1}"
    if len(parts) > 2:
        above = f"{wanted.major}.{wanted.minor}.{wanted.micro + 1}"
    metadata = metadata.replace(listed[0], f'{library} = [{listed["releases"]}, "{release}"]')
    return metadata.replace(ceiling[0], f'"{library}>={ceiling["floor"]},<{above}"')


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raise", dest="library", required=True, help="the library whose ceiling moves")
    parser.add_argument("release", help="the release that is tested from now on")
    parser.add_argument("packs", nargs="*", help="by default all that are tested with the library")
    given = parser.parse_args(arguments)
    for file in sorted(ROOT.glob("packs/*/pyproject.toml")):
        name = file.parent.name
        if given.packs and name not in given.packs:
            continue
        try:
            file.write_text(raised(file.read_text(), given.library, given.release))
        except ValueError as error:
            print(f"{name}: unchanged, {error}")
        else:
            print(f"{name}: tested with {given.library} {given.release}")
    print("next: python tools/model_table.py --write; the README's line of what is tested; nox -s nightly")


if __name__ == "__main__":
    main()
