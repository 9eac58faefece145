"""What the kit asks of a fresh process, whose hash seed is given: discovery without torch, digests of all plans.

Run as ``python -m shardcore.testing._alone PLUGIN``, with pickled cases on its input (nothing: those of the plugin); it
writes JSON.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from typing import Any

_HEAVY = ("torch", "transformers", "timm", "numpy")


def main(plugin: str, cases: bytes) -> dict[str, Any]:
    """Return problems of the discovery, problems of the policies, and digests by case and size."""
    from shardcore.hooks import PolicySpec
    from shardcore.plugins.registry import GROUP, Registry

    discovery = []
    if plugin:
        from importlib_metadata import EntryPoint

        registry = Registry.discover([EntryPoint(name=plugin.partition(".")[0], value=plugin, group=GROUP)])
    else:
        registry = Registry.discover()
    discovery += [f"{pack}: {type(pack.error).__name__}: {pack.error}" for pack in registry.packs if pack.error]
    heavy = [name for name in _HEAVY if name in sys.modules]
    if heavy:
        discovery.append(f"discovering {plugin or 'the packs'} imports {', '.join(heavy)}; name them in strings only")
    specs: list[PolicySpec] = [spec for pack in registry.packs for spec in pack.specs]
    return {"discovery": discovery, **_plans(plugin, cases, specs if plugin else [])}


def _plans(plugin: str, cases: bytes, specs: list[Any]) -> dict[str, Any]:
    from shardcore.errors import PlanError
    from shardcore.plugins.versions import is_met
    from shardcore.testing.subject import Subject, cases_of, meta_copy, registry_of

    policies: list[str] = []
    digests: dict[str, str] = {}
    covered: set[str] = set()
    found = pickle.loads(cases) if cases else cases_of(registry_of(plugin).packs[0].cases)
    for case in found:
        model = case.build()
        covered |= {f"{cls.__module__}.{cls.__qualname__}" for cls in type(model).__mro__[:1]}
        for tp in case.supports.tensor_parallel:
            try:
                plan = Subject(case=case, tp=tp, plugin=plugin).plan(meta_copy(model))
            except PlanError as error:
                digests[f"{case.name} at tp {tp}"] = str(error)
            else:
                digests[f"{case.name} at tp {tp}"] = plan.digest
    for spec in specs:
        if not is_met(spec.requires):
            continue
        module, _, name = spec.target.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            policies.append(f"{spec.target} does not exist; say for which releases it does with requires=")
        elif spec.target not in covered:
            policies.append(f"no case covers {spec.target}, so nothing shows that {spec.policy} is right")
    return {"policies": policies, "digests": digests}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.stdin.buffer.read())))
