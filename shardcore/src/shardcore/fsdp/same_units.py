"""Replicas that compare, in the first steps, which unit they are about to gather or to sum gradients of.

Towers of a model may be called in another order on each replica. Nothing fails then: FSDP2 takes the parameters of one
block for those of another that has as many. Where one replica leaves out a tower, the others wait for it.
"""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore.agree.store_barrier import StoreBarrier
from shardcore.errors import AgreementError
from shardcore.fsdp.units import FSDPUnit, parameter_groups

_COMPARED = 2  # forwards of each unit, and backwards

_TODO = (
    "Replicas gather parameters and sum gradients for each other, block by block: run the same blocks in the same "
    "order on all of them in every step, with rows that are masked or weighed with zero where a batch has none for a "
    "part of the model"
)


class SameUnits:
    """The units of one model on all replicas of a mesh; see `shardcore.fsdp.units.prepare_units`.

    ``gathers`` says that parameters are divided over them, and not whole on each.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, gathers: bool) -> None:
        self._model, self._gathers = type(model).__name__, gathers
        self._names = {module: name or "what is in no block" for name, module in model.named_modules()}
        self._ranks = [int(rank) for rank in mesh.mesh.flatten()]
        self._compared: Counter[tuple[nn.Module, str]] = Counter()

    def __call__(self, unit: FSDPUnit, way: str) -> None:
        """Meet the other replicas, if something will be sent for ``unit`` in this ``way``, and it is soon enough.

        Raises:
            AgreementError: they are about to do different things; on all of them.
            MissingRanksError: some did not come within the timeout of the process group.
        """
        if self._compared[unit.module, way] == _COMPARED or not self._sends(unit, way):
            return
        self._compared[unit.module, way] += 1
        ways = ("forward", "backward") if self._gathers else ("backward",)
        if all(self._compared[unit.module, each] == _COMPARED for each in ways):
            unit.meet = None
        about = f"the {way} of {self._names[unit.module]}"
        lost = f"this replica of {self._model} is about to run {about}, and these ranks did not come to it: {{ranks}}. "
        reports = StoreBarrier.wait(self._ranks, {"about": about}, "block", lost=lost + _TODO).reports
        first, *others = self._ranks
        for rank in others:
            if reports[rank] != reports[first]:
                raise AgreementError(
                    f"replicas of {self._model} run different blocks: rank {first} is about to run "
                    f"{reports[first]['about']}, and rank {rank} {reports[rank]['about']}. {_TODO}"
                )

    def _sends(self, unit: FSDPUnit, way: str) -> bool:
        groups = parameter_groups(unit.module._get_fsdp_state())  # type: ignore[operator]  # of FSDPModule
        gathers = self._gathers and any(not group.is_unsharded for group in groups)
        sums = way == "backward" and any(group.reduce_grads for group in groups)
        return gathers or (sums and any(parameter.requires_grad for parameter in unit.module.parameters()))
