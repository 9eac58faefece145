"""What the plan that a model brings says otherwise than its draft: a hint for who reads the draft, and never the truth.

Models of transformers have a ``tp_plan``: a style for each of many modules, by their paths. A draft follows from what
is computed, and is proved; such a plan is neither. It was seen to leave whole what can be split, and to say nothing of
a norm inside of an attention, of whose gradient each rank then has a part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from shardcore.plan.shard_plan import ShardPlan
from shardcore.plan.steps.modules import Swap

_SUMMED = ("replicated_with_grad_allreduce", "all_reduce")
_SPLIT = re.compile("colwise|rowwise|experts")


def otherwise(model: nn.Module, plan: ShardPlan) -> Iterator[str]:
    """Yield how the model's own plan differs from the plan of a draft, in words; numbers in paths are ``N``."""
    own: dict[str, str] = getattr(model, "tp_plan", None) or {}
    paths = [path for path, _ in model.named_modules()]
    styles = {path: style for path in paths for name, style in own.items() if fnmatchcase(path, name)}
    split = {p.name.rpartition(".")[0] for p in plan.parameters if p.layout and not p.layout.placement.is_replicate()}
    less = [path for path, style in styles.items() if _SPLIT.search(style) and path not in split]
    columns = {path.rpartition(".")[0] for path, style in styles.items() if style == "colwise"}
    parts = [step.path for step in plan.steps if isinstance(step, Swap) and dict(step.options).get("partial")]
    parts = [path for path in parts if path.rpartition(".")[0] in columns and styles.get(path) not in _SUMMED]
    if less:
        yield f"the model's own tp_plan splits what is whole here: {_alike(less)}"
    if parts:
        yield (
            f"the model's own tp_plan says nothing of {_alike(parts)}, which each rank applies to its own heads: "
            "trained by that plan, each rank has a part of their gradients"
        )


def _alike(paths: list[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "N", path) for path in paths))
