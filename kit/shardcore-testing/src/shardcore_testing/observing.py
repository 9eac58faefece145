"""Looking at what runs inside torch: collectives, and random draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Attention kernels are marked as random for the sake of their dropout, which none of those on the CPU has.
_NO_DRAW = "_scaled_dot_product"


class Collectives(TorchDispatchMode):
    """Notes the collectives that run inside, whoever starts them: c10d calls and functional ones.

    Attributes:
        names: of the operations in their order, such as ``c10d::allreduce_``.
        bytes: for each of them, the size of the whole tensor that it reduces, gathers or sends.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.names: list[str] = []
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what DTensor does inside is seen
        out = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and name.partition(".")[0] not in _NO_COLLECTIVES:
            self.names.append(func.name())
            # An in-place gather has its result among its arguments, a functional one returns it.
            self.bytes.append(max((tensor.nbytes for tensor in _tensors((args, out))), default=0))
        return out

    @property
    def count(self) -> int:
        """The number of collectives."""
        return len(self.names)

    @property
    def counts(self) -> Counter[str]:
        """The number of collectives of each kind, by names such as ``allreduce``."""
        return Counter(name.partition("::")[2].strip("_") for name in self.names)

    def take(self) -> int:
        """Return the number of collectives since the last time, and start again."""
        count = self.count
        self.names.clear()
        self.bytes.clear()
        return count


#: What accompanies a functional collective; counted too, each collective would be two or three.
_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)


def _draws(func: Any, out: Any) -> bool:
    """Tell whether a call drew numbers; single integers are left out, by which the sharded model seeds its regions."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func.__name__.startswith(_NO_DRAW):
        return False
    return not (isinstance(out, Tensor) and out.dim() == 0 and not out.is_floating_point())


class Draws(TorchDispatchMode):
    """Records every tensor of random numbers that is drawn inside: dropout masks and others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if _draws(func, out):
            self.drawn.append((out[1] if isinstance(out, tuple) else out).detach().clone())
        return out


class Replay(TorchDispatchMode):
    """Lets every random draw inside return what was drawn elsewhere.

    Args:
        drawn: for each draw in order, the parts of it that the ranks drew.
        rows: of the batch; heads, or tokens, that stand behind them in one dimension are put together row by row.
    """

    def __init__(self, drawn: Sequence[Sequence[Tensor]], rows: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._drawn = list(drawn)
        self._rows = rows
        self.used = 0
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _draws(func, out):
            return out
        if self.used == len(self._drawn):
            self.problems.append(f"the unsharded model draws more than the {len(self._drawn)} times of the sharded one")
            return out
        mask = out[1] if isinstance(out, tuple) else out
        whole = self._whole(self._drawn[self.used], mask)
        self.used += 1
        if whole is None:
            return out
        mask.copy_(whole)
        if isinstance(out, tuple):  # native_dropout(x, p, train)
            out[0].copy_(args[0] * whole / (1 - args[1]))
        return out

    def _whole(self, parts: Sequence[Tensor], like: Tensor) -> Tensor | None:
        """Put together what the ranks drew, judging each draw by whether it is as large as the unsharded one."""
        name = f"draw {self.used} of shape {tuple(like.shape)}"
        same = all(torch.equal(parts[0], part) for part in parts)
        if all(part.shape == like.shape for part in parts):
            if not same:
                self.problems.append(f"{name}: ranks draw different numbers for a replicated tensor (H6, H40)")
            return parts[0]
        for dim in range(like.dim() if like.dim() == parts[0].dim() else 0):
            rest = [[size for d, size in enumerate(t.shape) if d != dim] for t in (*parts, like)]
            drawn = sum(part.shape[dim] for part in parts)
            # Parts of a sequence are padded to equal lengths.
            if all(r == rest[0] for r in rest) and 0 <= drawn - like.shape[dim] < len(parts):
                if same and parts[0].numel() > 100:
                    self.problems.append(f"{name}: every rank draws the same numbers for its own part (H6)")
                if dim == 0 and drawn == like.shape[0] and not any(size % self._rows for size in map(len, parts)):
                    # (rows * heads, ...)
                    return torch.cat([part.unflatten(0, (self._rows, -1)) for part in parts], 1).flatten(0, 1)
                return torch.cat(list(parts), dim).narrow(dim, 0, like.shape[dim])
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        self.problems.append(f"{name}: the ranks draw {shapes}, which are no parts of it")
        return None


@contextmanager
def calls_of_leaves(blocks: Sequence[nn.Module]) -> Iterator[list[Counter[str]]]:
    """Count, for each block, the calls of the modules in it that have no children."""
    counts: list[Counter[str]] = []
    handles = []
    for block in blocks:
        counts.append(Counter())
        for name, module in block.named_modules():
            if not list(module.children()):

                def seen(*_: Any, counter: Counter[str] = counts[-1], name: str = name) -> None:
                    counter[name] += 1

                handles.append(module.register_forward_hook(seen))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
