"""A column linear as the region that it belongs to knows it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardcore.comm.dtensor_params import local_tensor
from shardcore.comm.exchange import Exchange
from shardcore.comm.strided import Runs
from shardcore.nn.linear.native import ParallelLinear

__all__ = ["Member", "Reading"]


class Reading:
    """What the entry of a region has read for one member, or for a module beside the members.

    An exception inside the region leaves it on the member, so it says whether the parameters have changed since.
    """

    def __init__(self, own: Sequence[Tensor], parameters: tuple[Tensor, ...]) -> None:
        self.parameters = parameters
        self._versions = _versions(own)

    def is_of(self, own: Sequence[Tensor]) -> bool:
        """Tell whether the parameters of the member are what they were."""
        return self._versions == _versions(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # tensors with a graph cannot be copied, and a copy of the model is in no region


def _versions(own: Sequence[Tensor]) -> list[int]:
    # An operation on a DTensor counts there, one on its local part here.
    tensors = (t for parameter in own for t in (parameter, local_tensor(parameter)))
    return [0 if t.is_inference() else t._version for t in tensors]


class Member(ParallelLinear):
    """A column linear, as far as the entry of its region multiplies and reads for it (`shardcore.nn.region`)."""

    #: How many neighbouring ranks gather the rows that they use from the parts that they hold; 1 for none.
    group_size: int
    #: How ranks get the rows that they use from those that hold them; None if each uses what it or a group holds.
    exchange: Exchange | None
    #: While its region is open: what the region's entry has read for it, if ranks share its parameters.
    reading: Reading | None
    #: The rows of the weight that this rank uses if its local tensor has others too, else None.
    rows: Runs | None
    #: Likewise of the bias.
    bias_rows: Runs | None

    @property
    def uses_what_it_holds(self) -> bool:
        """Tell whether the local tensors have the rows that this rank uses, and no others."""
        return self.group_size == 1 and self.exchange is None and self.rows is None and self.bias_rows is None

    @property
    def own_parameters(self) -> tuple[Tensor, ...]:
        """The weight, and the bias if there is one, as this rank holds them."""
        weight, bias = self.weight, self.bias
        return (weight,) if bias is None else (weight, bias)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Multiply by this rank's rows, outside the fast path of a region: (..., in) to (..., out/tp)."""
        raise NotImplementedError
