"""Parameters that no plan can shard, whatever its policy says."""

from __future__ import annotations

from shardcore.compile.builder import PlanBuilder
from shardcore.nn import ReplicatedLayout

__all__ = ["report_tensors"]


def report_tensors(builder: PlanBuilder) -> None:
    """Report parameters that are partly missing, cannot be trained, or have no collectives."""
    if builder.config.ranks == 1:
        return
    parameters = list(builder.model.named_parameters())
    absent = [name for name, parameter in parameters if parameter.is_meta]
    if 0 < len(absent) < len(parameters):
        builder.report(
            where=absent[0],
            what=f"{len(absent)} of the {len(parameters)} parameters are on the meta device, and the others not",
            todo="load or initialise the missing ones before shard(), or build the whole model on the meta device",
        )
    for name, parameter in parameters:
        what = ""
        if parameter.is_inference() and not builder.config.inference_only:
            what = "it was made under torch.inference_mode() and can never be trained"
            todo = "build the model outside of inference mode, or say inference_only=True"
        elif not parameter.is_floating_point() and _needs_numbers(builder, name):
            what = f"a parameter of {parameter.dtype} cannot be split, and its gradient cannot be summed over ranks"
            todo = "say replicate for it, or shard the model before it is quantized"
        if what:
            builder.report(where=name, what=what, todo=todo)


def _needs_numbers(builder: PlanBuilder, name: str) -> bool:
    """Tell whether a parameter is split, or its gradient summed, which complex numbers and integers do not allow."""
    layouts = [claim.layout for claim in builder.claims.get(name, ())]
    return builder.ranks > 1 and any(layout not in (None, ReplicatedLayout()) for layout in layouts)
