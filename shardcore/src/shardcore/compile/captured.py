"""What a model may capture from its layers, and no rule gathers: it would return each rank's part as if it were all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardcore.compile.builder import PlanBuilder
from shardcore.nn.outputs import CAPTURED
from shardcore.plan.steps import RefuseCaptured, above

__all__ = ["refuse_captured"]


def refuse_captured(builder: PlanBuilder) -> None:
    """Plan that modules refuse to return what no rule gathers.

    These are the ones whose configuration can ask for it, as far as they are above all blocks.
    """
    tokens = (step.path for step in builder.steps.values() if step.splits_tokens)
    refused: dict[str, dict[str, str]] = defaultdict(dict)
    for name, places in zip(CAPTURED, (builder.attentions, tokens), strict=True):
        gathered = {step.path for step in builder.steps.values() if name in step.gathers_captured}
        for place in places:
            if gathered.isdisjoint((place, *above(place))):
                for path in _asked(builder, place, name):
                    refused[path].setdefault(name, place)
    for path, outputs in refused.items():
        builder.add_late(RefuseCaptured(path=path, outputs=tuple(outputs.items())))


def _asked(builder: PlanBuilder, place: str, name: str) -> Iterator[str]:
    for path in (place, *above(place)):
        module = builder.named[path]
        within = any(part.isdigit() for part in path.split("."))
        if not within and hasattr(getattr(module, "config", None), f"output_{name}"):
            yield builder.paths[id(module)]
