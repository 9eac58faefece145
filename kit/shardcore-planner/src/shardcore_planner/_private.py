"""What the planner uses of torch without a promise of its authors; see `shardcore._private`."""

from __future__ import annotations

from shardcore._private import TESTED, PrivateName, Uses

_PLANNING = "planning a step"

TORCH = Uses(
    "torch",
    TESTED,
    (
        PrivateName(
            "torch.utils._python_dispatch.TorchDispatchMode", "seeing what a step allocates and sends", _PLANNING
        ),
        PrivateName(
            "torch.distributed.tensor.debug._clear_sharding_prop_cache",
            "forgetting the rank that was simulated",
            _PLANNING,
        ),
        PrivateName("torch._subclasses.fake_tensor.FakeTensorMode", "running a step that allocates nothing", _PLANNING),
    ),
)
