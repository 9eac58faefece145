"""What torch remembers for as long as the process lives, and what holds process groups with it.

A worker of the pool joins hundreds of groups. One that something still holds when it has ended keeps its threads, some
of which wake a hundred times a second: two hundred of them were seen to cost a tenth of a test suite's CPU time.
"""

from __future__ import annotations

import sys
import weakref

import torch


def forget_compiled() -> None:
    """Drop what was compiled: it holds groups by name, and ends the process if they are gone when it is used again."""
    if "torch._dynamo" not in sys.modules:
        return
    torch._dynamo.reset()
    # Not public either, and left by `reset`: compiled graphs are globals of the module whose function was compiled,
    # with the group they were traced with, and modules that guards compare with keep these guards alive.
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.utils import CleanupManager

    PhiloxStateTracker.reset()  # fake tensors of the last trace, with all that was traced
    manager = CleanupManager.instance
    for remove in [remove for removals in manager.values.values() for remove in removals]:
        remove()
    manager.clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # Python's own list of them
        if (found := finalizer.peek()) is not None:
            called = getattr(found[1], "func", found[1])  # of a functools.partial
            if isinstance(getattr(called, "__self__", None), CheckFunctionManager):
                finalizer.detach()


def forget_meshes() -> None:
    """Drop what DTensor remembers of its operations: it holds meshes, equal to later ones, whose groups end now.

    As long as they live, what is remembered saves much time.
    """
    if "torch.distributed.tensor" in sys.modules:
        # None of them is public.
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor._collective_utils import MeshTopoInfo
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()
        MeshTopoInfo.build_from_mesh.cache_clear()
