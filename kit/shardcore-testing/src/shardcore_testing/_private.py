"""What the kit uses of torch without a promise of its authors; see `shardcore._private`."""

from __future__ import annotations

from shardcore._private import TESTED, PrivateName, Uses

_KIT = "shardcore_testing"
_DYNAMO = "torch._dynamo"
_TENSOR = "torch.distributed.tensor"

TORCH = Uses(
    "torch",
    TESTED,
    (
        PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "counting collectives and draws", _KIT),
        *(
            PrivateName(path, "forgetting what one test leaves to the next", _KIT)
            for path in (
                "torch._decomp.decompositions_for_rng.PhiloxStateTracker",
                f"{_DYNAMO}.reset",
                f"{_DYNAMO}.guards.CheckFunctionManager",
                f"{_DYNAMO}.utils.CleanupManager",
                f"{_DYNAMO}.trace_rules.clear_lru_cache",
                "torch.distributed.distributed_c10d._world",
                f"{_TENSOR}.debug._clear_sharding_prop_cache",
                f"{_TENSOR}._redistribute.clear_redistribute_planner_cache",
                f"{_TENSOR}._redistribute._gen_transform_infos",
                f"{_TENSOR}._collective_utils.MeshTopoInfo",
            )
        ),
    ),
)
