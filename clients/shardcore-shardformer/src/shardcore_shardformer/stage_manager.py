"""`PipelineStageManager`: where this rank is in a pipeline, for those who know ColossalAI's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardcore.errors import ConfigError
from shardcore.mesh.axes import axis_name


class PipelineStageManager:
    """Tells where this rank is on the axis ``pp`` of a mesh, and gives a `ShardConfig` that mesh.

    ```python
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "tp"))
    config = ShardConfig(pipeline_stage_manager=PipelineStageManager(mesh))
    ```

    After ColossalAI's ``PipelineStageManager``, which is given a ``ProcessGroupMesh``.

    Args:
        device_mesh: a mesh with an axis ``pp``, as `ShardConfig.device_mesh` has it.
        num_layers_per_stage: how many blocks each stage has; by default the work of stages is even. Where a schedule
            gives each rank several stages, a number for each of them.

    Attributes:
        device_mesh: the mesh.
        num_layers_per_stage: as given.
        num_stages: how many ranks share the blocks.
        stage: this rank's place among them.

    Raises:
        ConfigError: the mesh has no axis ``pp``, or ``num_layers_per_stage`` has other numbers than stages need.
    """

    def __init__(self, device_mesh: DeviceMesh, num_layers_per_stage: Sequence[int] | None = None) -> None:
        axis = axis_name(device_mesh, "pp") if isinstance(device_mesh, DeviceMesh) else None
        if axis is None:
            raise ConfigError(
                f"PipelineStageManager wants a DeviceMesh with an axis 'pp', got {device_mesh!r}; make it by "
                "init_device_mesh('cuda', (2, 4), mesh_dim_names=('pp', 'tp'))"
            )
        self.device_mesh = device_mesh
        self.num_layers_per_stage = None if num_layers_per_stage is None else tuple(num_layers_per_stage)
        self._group: ProcessGroup = device_mesh[axis].get_group()
        self._ranks = dist.get_process_group_ranks(self._group)
        self.num_stages, self.stage = len(self._ranks), dist.get_rank(self._group)
        counts = self.num_layers_per_stage
        if counts is not None and (len(counts) % self.num_stages or any(type(n) is not int or n < 1 for n in counts)):
            raise ConfigError(
                f"PipelineStageManager(num_layers_per_stage={counts}) for {self.num_stages} ranks; wanted "
                "a positive integer for each stage, as many for each rank"
            )

    @property
    def bounds(self) -> tuple[int, ...] | None:
        """The same as `ShardConfig.pipeline_bounds`; None where the work of stages is to be even."""
        counts = self.num_layers_per_stage
        return None if counts is None else (0, *itertools.accumulate(counts))

    def is_first_stage(self) -> bool:
        """Tell whether this rank has the first blocks."""
        return self.stage == 0

    def is_last_stage(self) -> bool:
        """Tell whether this rank has the last blocks, under a schedule with one stage for each rank."""
        return self.stage == self.num_stages - 1

    def get_rank(self) -> int:
        """Return this rank's number in the default process group."""
        return dist.get_rank()

    def get_prev_rank(self) -> int:
        """Return the number, in the default process group, of the rank with the stage before; of the first the last."""
        return self._ranks[self.stage - 1]

    def get_next_rank(self) -> int:
        """Return the number, in the default process group, of the rank with the next stage; of the last the first."""
        return self._ranks[(self.stage + 1) % self.num_stages]

    def get_process_group(self) -> ProcessGroup:
        """Return the ranks of this rank's pipeline."""
        return self._group
