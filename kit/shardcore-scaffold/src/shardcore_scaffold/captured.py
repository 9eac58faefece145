"""What a model can be asked for, attention weights and the hidden states of its blocks, and the rule that gathers it.

The rule stands under the class that returns them, which is not always the one whose forward runs the blocks. Each class
that could be it is tried: one rank of two that are not there has to return shapes like those of the unsharded model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.api import shard
from shardcore.plan.steps.base import Step
from shardcore_planner.simulation import simulated_ranks
from shardcore_scaffold.draft import Draft, plan_of, policy_of
from shardcore_scaffold.facts import Facts

_RANKS = 2
#: What is asked for: the output, the argument of the rule, and how the ranks hold it.
_OUTPUTS = (("attentions", "heads"), ("cross_attentions", "heads"), ("hidden_states", "sequence"))

_ASKED = ("attentions", "hidden_states")  # the first for both kinds

Shapes = dict[str, list[tuple[int, ...]]]


def add_captured(draft: Draft, facts: Facts) -> bool:
    """Add the rule for what the model would refuse to return, to a draft that fits; say so where none is found.

    Return whether what the model can be asked for is whole, or refused.
    """
    refused = list(_refused(draft, facts))
    wanted = _captured(facts, None) if refused or facts.parts else {}
    kept = tuple(name for name, _ in _OUTPUTS if any(key.endswith(name) for key in wanted))
    if not wanted:
        return True
    if not refused and _captured(facts, draft) == wanted:
        draft.captured = kept
        return True
    names = {name for step in refused for name in step.refuses_captured}
    names |= {"cross_attentions"} & wanted.keys()
    arguments = ", ".join(f'{name}="{held}"' for name, held in _OUTPUTS if name in names)
    for classes in _candidates(step.path for step in refused):
        further = copy.deepcopy(draft)
        for cls in dict.fromkeys(type(facts.modules[path]).__name__ for path in classes):
            further.add(cls, "outputs", f"outputs({arguments}),")
        if _captured(facts, further) == wanted:
            draft.rows, draft.words = further.rows, further.words
            draft.captured = kept
            return True
    draft.doubts.append(f"captured {' and '.join(sorted(names))} are refused: no outputs({arguments}) was found to fit")
    others = [(name,) for name in _ASKED if name not in names] if facts.parts else []
    return all(_captured(facts, draft, asked) == _captured(facts, None, asked) for asked in others)


def _refused(draft: Draft, facts: Facts) -> Iterator[Step]:
    plan = plan_of(facts.model, draft, **_fields(draft))
    yield from (step for step in plan.steps if step.refuses_captured)


def _candidates(paths: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield each module, inner ones first, and then all innermost ones together: the stacks of a model."""
    inner = sorted(paths, key=lambda path: -path.count(".") if path else 1)
    yield from ((path,) for path in inner)
    innermost = tuple(
        p for p in inner if not any(other.startswith(f"{p}." if p else "") for other in inner if other != p)
    )
    if len(innermost) > 1:
        yield innermost


def _captured(facts: Facts, draft: Draft | None, asked: Sequence[str] = _ASKED) -> Shapes:
    """Return the shapes of what the model captures when asked, by output; empty if it captures nothing, or fails.

    Args:
        facts: of the model.
        draft: by which it is sharded; None leaves it whole.
        asked: what it is asked for.
    """
    model = copy.deepcopy(facts.fresh)
    try:
        if callable(choose := getattr(model, "set_attn_implementation", None)):
            choose("eager")  # others return no weights
        if draft is None:
            return dict(_shapes(facts.call(_Asking(model, asked))))
        with simulated_ranks(_RANKS):
            sharded = shard(model, tp=_RANKS, policy=policy_of(type(facts.model), draft), **_fields(draft))
            return dict(_shapes(facts.call(_Asking(sharded, asked))))
    except Exception:  # of the model's own code, which need not know the arguments
        return {}


def _fields(draft: Draft) -> dict[str, Any]:
    return {"enable_sequence_parallelism": True} if draft.sequence else {}


class _Asking(nn.Module):
    """Calls a model and asks for what it can capture."""

    def __init__(self, model: nn.Module, asked: Sequence[str]) -> None:
        super().__init__()
        self.model, self.asked = model, {f"output_{name}": True for name in asked}

    def forward(self, **inputs: Any) -> Any:
        """Call it."""
        with torch.no_grad():
            return self.model(**inputs, **self.asked)


def _shapes(out: Any) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    for name, value in out.items() if isinstance(out, Mapping) else ():
        captured = [tuple(t.shape) for t in value if isinstance(t, Tensor)] if isinstance(value, tuple | list) else []
        if captured and any(name.endswith(end) for end, _ in _OUTPUTS):
            yield name, captured
