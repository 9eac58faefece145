"""What lies inside regions, where each rank's gradient is a summand: what may be there, and what is a problem."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardcore.draft import Draft
from shardcore.errors import Problem
from shardcore.nn import Replicated, VocabEmbedding
from shardcore.steps import OpenRegion, Swap

__all__ = ["report_replicated_inside"]


def report_replicated_inside(draft: Draft) -> None:
    """Report replicated parameters inside a region whose gradients are not summed.

    Whatever runs between the entry and the row linear sees the activations of its rank, or hands its output to what
    does: its gradient is this rank's summand, and without a sum replicas drift apart.
    """
    swaps = [step for step in draft.steps.values() if isinstance(step, Swap) and _sums_nothing(step)]
    by_module = {id(draft.model.get_submodule(step.path)): step for step in swaps}
    for region in list(draft.steps.values()):
        if isinstance(region, OpenRegion) and region.row is not None:
            for module in _inside(draft.model, region):
                if (step := by_module.get(id(module))) is not None:
                    _report(draft, region, step, module)


def _sums_nothing(step: Swap) -> bool:
    replicates = issubclass(step.target, Replicated) and not dict(step.options).get("partial", False)
    return replicates or issubclass(step.target, VocabEmbedding)


def _inside(model: nn.Module, region: OpenRegion) -> list[nn.Module]:
    """Return the modules that are provably inside of the region."""
    entry = model.get_submodule(region.path)
    if region.path not in region.members:
        own = (*region.members, region.row or "")
        known = [m for name in (*own, *region.after) if (m := _module(model, name)) is not None]
        outside = {id(m) for module in known for m in module.modules()}
        return [m for m in entry.modules() if id(m) not in outside]
    # Nothing marks where a linear that enters by itself is called, but in a Sequential.
    return [m for module in _between(model, region.path, region.row or "") for m in module.modules()]


def _between(model: nn.Module, first: str, last: str) -> Iterator[nn.Module]:
    """Yield the modules that a Sequential with both linears calls after the one and before the other."""
    parent, _, start = first.rpartition(".")
    other, _, stop = last.rpartition(".")
    sequence = model.get_submodule(parent)
    if parent != other or type(sequence).forward is not nn.Sequential.forward:
        return
    names = list(sequence._modules)
    for name in names[names.index(start) + 1 : names.index(stop)]:
        yield sequence.get_submodule(name)


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a bare parameter
        return None


def _report(draft: Draft, region: OpenRegion, step: Swap, module: nn.Module) -> None:
    for name, parameter in module._parameters.items():
        full = ".".join(filter(None, (step.path, name)))
        if parameter is None or full in region.after:
            continue
        claims = draft.claims.get(full)
        problem = Problem(
            where=full,
            row=claims[0].row if claims else step.describe(),
            what=f"it is inside the region that is entered at {region.path or 'the model itself'} and left at "
            f"{region.row}: its gradient would be this rank's summand, and the replicas would drift apart",
            todo=f"say partial({region.short(step.path)!r}), which sums it; or after={region.short(full)!r} in the "
            f"region's row, if it acts on what {region.short(region.row or '')} returns",
        )
        if problem not in draft.problems:
            draft.problems.append(problem)
