"""Parameters that no plan can shard, whatever its policy says."""

from __future__ import annotations

from shardcore.compile.builder import Draft
from shardcore.errors import Problem
from shardcore.nn import Whole

__all__ = ["report_tensors"]


def report_tensors(draft: Draft) -> None:
    """Report parameters that are partly missing, cannot be trained, or have no collectives."""
    if draft.config.ranks == 1:
        return
    parameters = list(draft.model.named_parameters())
    absent = [name for name, parameter in parameters if parameter.is_meta]
    if 0 < len(absent) < len(parameters):
        draft.problems.append(
            Problem(
                where=absent[0],
                row="(none)",
                what=f"{len(absent)} of the {len(parameters)} parameters are on the meta device, and the others not",
                todo="load or initialise the missing ones before shard(), or build the whole model on the meta device",
            )
        )
    for name, parameter in parameters:
        what = ""
        if parameter.is_inference() and not draft.config.inference_only:
            what = "it was made under torch.inference_mode() and can never be trained"
            todo = "build the model outside of inference mode, or say inference_only=True"
        elif not parameter.is_floating_point() and _needs_numbers(draft, name):
            what = f"a parameter of {parameter.dtype} cannot be split, and its gradient cannot be summed over ranks"
            todo = "say replicate for it, or shard the model before it is quantized"
        if what:
            draft.problems.append(Problem(where=name, row="(none)", what=what, todo=todo))


def _needs_numbers(draft: Draft, name: str) -> bool:
    """Tell whether a parameter is split, or its gradient summed, which complex numbers and integers do not allow."""
    layouts = [claim.layout for claim in draft.claims.get(name, ())]
    return draft.ranks > 1 and any(layout not in (None, Whole()) for layout in layouts)
