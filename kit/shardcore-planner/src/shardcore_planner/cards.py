"""How fast a device computes and ranks send, as measured: with it a plan tells how long a step takes.

An operation takes the longer of what its products and what its memory need (the roofline of Williams, Waterman and
Patterson, https://doi.org/10.1145/1498765.1498785), and the host so long to call it. An accelerator computes while the
host goes on, and a CPU does not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardcore.errors import ConfigError

if TYPE_CHECKING:
    from shardcore_planner.results import Traffic

#: What torch's dtypes are called, as in `shardcore_planner.workload.DTYPES`.
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What lies between the ranks of one axis.

    Attributes:
        rate: bytes that a rank sends in a second.
        latency: seconds that each collective takes besides.
    """

    rate: float
    latency: float = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The rates of one device, and of what lies between ranks.

    Attributes:
        name: of the device.
        device: ``"cuda"`` or ``"cpu"``.
        products: multiplications and additions in a second, by dtype (``"bf16"``, ``"fp32"``).
        memory: bytes that are read and written in a second.
        call: seconds that the host needs for one operation of a training.
        links: by axis, or under ``""`` of all axes that are not named.
    """

    name: str
    device: str
    products: Mapping[str, float]
    memory: float
    call: float
    links: Mapping[str, Link] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Card:
        """Return the card of a name, or of a file that ``shardcore calibrate`` has written.

        Raises:
            ConfigError: there is no such card, or the file is none.
        """
        if (known := CARDS.get(text)) is not None:
            return known
        try:
            said = json.loads(Path(text).read_text(encoding="utf-8"))
            links = {axis: Link(**link) for axis, link in said.pop("links", {}).items()}
            return cls(**said, links=links)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{text!r} is no card: {error}. Known are {', '.join(CARDS)}; a file of this machine is written by "
                "shardcore calibrate FILE"
            ) from error

    def time(self, operations: int, moved: int, dtype: torch.dtype | None) -> float:
        """Return the seconds that an operation takes on the device.

        Raises:
            ConfigError: nothing is known of products in ``dtype``.
        """
        if not operations:
            return moved / self.memory
        name = _NAMES.get(dtype, "") if dtype is not None else ""
        if name not in self.products:
            raise ConfigError(
                f"the card {self.name} has no rate for products in {name or dtype}, only in "
                f"{', '.join(self.products)}; plan with such a --dtype, or measure it there: shardcore calibrate FILE"
            )
        return max(operations / self.products[name], moved / self.memory)

    def computing(self, device: float, host: float) -> float:
        """Return how long it takes to compute for ``device`` seconds what the host calls in ``host`` seconds."""
        return max(device, host) if self.device == "cuda" else device + host

    def sending(self, traffic: Traffic) -> float | None:
        """Return the seconds of some collectives, if ranks are a ring; None where no link is known."""
        link = self.links.get(traffic.axis, self.links.get(""))
        return None if link is None else traffic.sent / link.rate + traffic.count * link.latency


#: Cards that were measured: `docs/gpu.md` has the runs.
CARDS: Mapping[str, Card] = {
    "h200": Card(
        name="NVIDIA H200",
        device="cuda",
        products={"bf16": 790e12, "fp16": 790e12},
        memory=4.3e12,
        call=8e-6,
    ),
}
