"""Write what the installed release of transformers is for all packs, as JSON: python tools/release_facts.py FILE.

The classes that it has with a head, with their model types; and of every case of every installed pack what its small
model holds, and how it is sharded over two tensor-parallel ranks.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import transformers
from census import classes  # from tools/

from shardcore.errors import ShardcoreError
from shardcore.plugins.registry import default_registry
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.subject import Subject, cases_of


def facts() -> dict[str, Any]:
    """Return the facts, with names that a reader of the table knows."""
    found: dict[str, Any] = {"release": transformers.__version__, "classes": classes(), "cases": {}}
    for pack in sorted(default_registry().packs, key=lambda pack: pack.name):
        for case in cases_of(pack.cases) if pack.cases else ():
            if 2 in case.supports.tensor_parallel:
                found["cases"][f"{pack.name} {case.name}"] = _of_case(Subject(case=case, tp=2))
    return found


def _of_case(subject: Subject) -> dict[str, Any]:
    try:
        model = subject.build()
        held = {name: str(tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
        return {"holds": held, "plan": str(subject.plan(model))}
    except ShardcoreError as error:
        return {"error": str(error)}
    except Exception as error:  # whatever a release has made of a class
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with no_float32_islands():
        Path(sys.argv[1]).write_text(json.dumps(facts()), encoding="utf-8")
