"""Quantized linears as linears: what a policy calls ``column("q_proj")`` is a ``torch.nn.Linear`` where it is cut."""

from __future__ import annotations

from typing import Any

from bitsandbytes.nn.modules import Linear4bit, LinearFP4, LinearNF4
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.plan import ShardPlan
from shardcore.plan.shard_plan import ModelPhase
from shardcore_bitsandbytes.weights import Weight4Bit

# What such a linear has beside what ``torch.nn.Linear`` has.
_OF_BITSANDBYTES = (
    "quant_state",
    "compute_dtype",
    "compute_type_is_set",
    "quant_storage",
    "support_avx512bf16_for_cpu",
)
_KINDS = (Linear4bit, LinearFP4, LinearNF4)


def unpacking(model: nn.Module) -> Unpacking | None:
    """Return the phase that makes the quantized linears of ``model`` ordinary ones, or None if it has none.

    Raises:
        NotSupportedError: it has something of bitsandbytes that cannot be cut.
    """
    found = []
    for path, module in model.named_modules():
        if type(module) in _KINDS:
            found.append((path, module))
        elif type(module).__module__.partition(".")[0] == "bitsandbytes":
            raise NotSupportedError(
                f"{path} is a {type(module).__module__}.{type(module).__qualname__}, which cannot be divided: what it "
                "computes depends on whole rows of its input. Weights of 4 bits can: "
                "BitsAndBytesConfig(load_in_4bit=True)"
            )
    return Unpacking(found) if found else None


class Unpacking(ModelPhase):
    """Quantized linears, which are ``torch.nn.Linear`` with a `Weight4Bit` from `begin` on.

    Args:
        modules: the linears, by their paths.

    Raises:
        NotSupportedError: one was not quantized yet, or cannot be.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._modules = dict(modules)
        self._weights = {path: _weight(path, module) for path, module in modules}
        self._before: list[tuple[type, dict[str, Any], nn.Parameter]] = []

    def begin(self) -> None:
        """Make them linears."""
        for path, module in self._modules.items():
            own: Any = module
            self._before.append((type(module), dict(vars(module)), own.weight))
            for name in _OF_BITSANDBYTES:
                vars(module).pop(name, None)
            module.__class__ = nn.Linear
            own.weight = nn.Parameter(self._weights[path], requires_grad=False)

    def check(self, plan: ShardPlan) -> None:
        """Refuse parts that would begin or end inside of a block.

        Raises:
            NotSupportedError: one would.
        """
        ranks = plan.config.tensor_parallel_size or 1
        for parameter in plan.parameters:
            weight = self._weights.get(parameter.name.removesuffix(".weight"))
            if weight is None or parameter.layout is None:
                continue
            whole = tuple(weight.shape)
            for rank in range(ranks):
                rows, columns = parameter.layout.shape(whole, ranks, rank)
                if rows * columns % weight.block or (columns != whole[1] and columns % weight.block):
                    raise NotSupportedError(
                        f"{parameter.name}, {whole[0]} x {whole[1]}, is quantized in blocks of {weight.block} values "
                        f"along its rows, and the part of rank {rank} of {ranks}, {rows} x {columns}, is no whole "
                        "number of them: take fewer ranks, or leave the module out of quantization "
                        "(llm_int8_skip_modules of BitsAndBytesConfig)"
                    )

    def give_up(self) -> None:
        """Make them what they were."""
        for module, (kind, attributes, weight) in zip(self._modules.values(), self._before, strict=False):
            module.__class__ = kind
            vars(module).update(attributes)
            module._parameters["weight"] = weight
        self._before.clear()
        self._weights.clear()

    def runs(self, context: ShardContext | None) -> bool:
        """Also where nothing was sharded: they become what they were."""
        return True

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Let go of what they were."""
        if context is None:
            self.give_up()
        self._before.clear()
        self._weights.clear()


def _weight(path: str, module: Any) -> Weight4Bit:
    if module.weight.is_meta:
        return Weight4Bit.to_come(module.weight, module.compute_dtype)
    if getattr(module.weight, "quant_state", None) is None:
        raise NotSupportedError(
            f"{path} is a {type(module).__name__} that is not quantized yet, which it is when it comes to its device: "
            "call model.to(device) before shard()"
        )
    module.state_dict()  # brings what a CPU has packed for its kernels into the usual form
    return Weight4Bit.of(module.weight, module.compute_dtype)
