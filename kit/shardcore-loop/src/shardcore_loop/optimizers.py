"""Optimizers that know no DTensors, on the plain tensors behind the parameters of a sharded model.

The parameters of a sharded model are DTensors, and most optimizers step them as they are. Those that use operations
which DTensor lacks get plain tensors here, and their results go back:

```python
from transformers.optimization import Adafactor
from shardcore_loop import LocalParts, WholeTensors

optimizer = WholeTensors(Adafactor, model.parameters(), lr=1e-3, relative_step=False)
optimizer = LocalParts(torch.optim.Rprop, model.parameters(), lr=1e-3)
```

`WholeTensors` gives every optimizer what the unsharded model would. `LocalParts` sends nothing and is for those that
treat each element by itself. Both are a `torch.optim.Optimizer`: schedules, clipping, scaling and checkpoints go on as
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer
from typing_extensions import override

from shardcore.comm.dtensor_params import local_tensor, spec_of, with_spec
from shardcore.comm.parts import laid_out, part_of
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.nn.optimizers import looks_at_wholes


class _Handing(Optimizer):
    """Steps other optimizers, the *inner* ones, on a plain parameter in the place of each DTensor: its *stand-in*."""

    def __init__(self, kind: Callable[..., Optimizer], params: Iterable[Any], apart: bool, settings: Any) -> None:
        groups = _groups(params)
        self._stand_ins: dict[Tensor, nn.Parameter] = {
            p: nn.Parameter(self._between_steps(p), requires_grad=p.requires_grad)
            for group in groups
            for p in group["params"]
        }
        self._owners: dict[Tensor, Tensor] = {stand_in: p for p, stand_in in self._stand_ins.items()}
        # For each: the optimizer, and which of our groups each of its groups is a part of.
        self._inner: list[tuple[Optimizer, list[int]]] = []
        if apart:
            for at, group in enumerate(groups):
                for p in group["params"]:
                    self._inner.append((kind([{**group, "params": [self._stand_ins[p]]}], **settings), [at]))
        else:
            plain = [{**group, "params": [self._stand_ins[p] for p in group["params"]]} for group in groups]
            self._inner.append((kind(plain, **settings), list(range(len(groups)))))
        options: dict[int, dict[str, Any]] = {}
        for inner, ours in self._inner:
            for at, group in zip(ours, inner.param_groups, strict=True):
                options.setdefault(at, group)
        made = [{**options.get(at, {}), **group} for at, group in enumerate(groups)]
        super().__init__(made, dict(self._inner[0][0].defaults) if self._inner else {})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while this is made; later it is refused.

        Raises:
            NotSupportedError: it was made before.
        """
        if any(p not in self._stand_ins for p in _listed(param_group["params"])):
            raise NotSupportedError(
                f"{type(self).__name__}.add_param_group after it was made; give it all groups when it is made"
            )
        super().add_param_group(param_group)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; every rank calls it.

        Args:
            closure: runs the model and its backward, and returns the loss. Of replicas the mean of their losses counts.

        Returns:
            what the optimizer returns: the first loss of ``closure``, if there is one.
        """
        if closure is not None and len(self._inner) > 1:
            raise NotSupportedError(f"{type(self).__name__}.step(closure) with one_by_one=True; call step() without it")
        self._set_options()
        loss = None
        for inner, _ in self._inner:
            mine = self._stepped_by(inner)
            self._lend(mine)
            try:
                loss = inner.step() if closure is None else inner.step(self._around(closure, mine))
                self._give_back(mine)
            finally:
                self._leave(mine)
        self._get_options()
        self._get_state()
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state, of which tensors that lie as their parameter does are DTensors."""
        self._get_state()
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state_dict)
        for inner, _ in self._inner:
            inner.state.clear()
            for p in self._stepped_by(inner):
                if p in self.state:
                    inner.state[self._stand_ins[p]] = {k: self._state_in(v, p) for k, v in self.state[p].items()}
            inner.state.update({k: v for k, v in self.state.items() if not isinstance(k, Tensor)})
        self._set_options()

    def _stepped_by(self, inner: Optimizer) -> list[Tensor]:
        """Return our parameters whose stand-ins an inner optimizer has, in its order, which is that of all ranks."""
        return [self._owners[stand_in] for group in inner.param_groups for stand_in in group["params"]]

    def _around(self, closure: Callable[[], Any], mine: list[Tensor]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                self._give_back(mine)
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._lend(mine)
                return _mean(loss, mine) if isinstance(loss, Tensor) else loss

        return run

    def _set_options(self) -> None:
        """Let the inner groups have what a schedule or a user has set in ours."""
        for inner, ours in self._inner:
            for at, group in zip(ours, inner.param_groups, strict=True):
                group.update({k: v for k, v in self.param_groups[at].items() if k != "params"})

    def _get_options(self) -> None:
        """Take what optimizers keep in their groups: some count steps there."""
        for inner, ours in self._inner:
            for at, group in zip(ours, inner.param_groups, strict=True):
                self.param_groups[at].update({k: v for k, v in group.items() if k != "params"})

    def _get_state(self) -> None:
        ours: dict[Any, Any] = self.state
        for inner, _ in self._inner:
            for key, values in inner.state.items():
                if isinstance(key, Tensor):
                    p = self._owners[key]
                    ours[p] = {name: self._state_out(value, p) for name, value in values.items()}
                else:
                    ours[key] = values

    def _lend(self, mine: list[Tensor]) -> None:
        """Give the stand-ins values and gradients."""
        for p in mine:
            stand_in = self._stand_ins[p]
            stand_in.grad = None
            stand_in.data = self._plain(p)
            stand_in.grad = None if p.grad is None else self._plain(p.grad)

    def _leave(self, mine: list[Tensor]) -> None:
        """Free what the stand-ins hold."""
        for p in mine:
            stand_in = self._stand_ins[p]
            stand_in.grad = None
            stand_in.data = self._between_steps(p)

    def _between_steps(self, p: Tensor) -> Tensor:
        """Return what the stand-in of ``p`` holds, without memory where it is to have memory in a step alone."""
        raise NotImplementedError

    def _plain(self, tensor: Tensor) -> Tensor:
        """Return what a stand-in has of a parameter or a gradient in a step."""
        raise NotImplementedError

    def _give_back(self, mine: list[Tensor]) -> None:
        """Bring the values of the stand-ins to the parameters."""
        raise NotImplementedError

    def _state_out(self, value: Any, p: Tensor) -> Any:
        """Return state of the stand-in of ``p`` as ours: as a DTensor it says what other ranks have of it."""
        raise NotImplementedError

    def _state_in(self, value: Any, p: Tensor) -> Any:
        """Return state of ours, or of the unsharded model's optimizer, as the stand-in's."""
        raise NotImplementedError


class WholeTensors(_Handing):
    """Steps an optimizer on the whole parameters and gradients, as plain tensors, and keeps this rank's part.

    Every rank makes the same whole step, so that any optimizer gives what it gives the unsharded model: those that look
    at rows, columns or norms of a tensor, and those that look at all tensors at once (``LBFGS``).

    Args:
        kind: the class of the optimizer, or a function that makes one, called with groups of plain parameters.
        params: of the sharded model, as ``kind`` takes them: parameters or groups. Plain ones may be among them.
        one_by_one: hold one whole parameter at a time, with its gradient, instead of all of them. Right for optimizers
            that treat every tensor by itself (``Adafactor``, ``Shampoo``), wrong for those that do not: ``LBFGS``, a
            norm over all gradients, one random stream for all tensors.
        **settings: further arguments of ``kind``.

    The optimizer's state is of whole tensors, on every rank: little for ``Adafactor`` (a row and a column), twice the
    whole model for moments. Gradients and parameters are gathered in each step.
    """

    def __init__(
        self, kind: Callable[..., Optimizer], params: Iterable[Any], *, one_by_one: bool = False, **settings: Any
    ) -> None:
        super().__init__(kind, params, one_by_one, settings)

    @override
    def _between_steps(self, p: Tensor) -> Tensor:
        # One number that has the shape of all of them.
        return torch.zeros((), dtype=p.dtype, device=local_tensor(p).device).expand(p.shape)

    @override
    def _plain(self, tensor: Tensor) -> Tensor:
        return _whole(tensor)

    @override
    def _give_back(self, mine: list[Tensor]) -> None:
        for p in mine:
            whole = self._stand_ins[p].detach()
            p.copy_(part_of(whole, p) if isinstance(p, DTensor) else whole)

    @override
    def _state_out(self, value: Any, p: Tensor) -> Any:
        spec = spec_of(p)
        if spec is None or not isinstance(value, Tensor) or not value.ndim:
            return value
        return DTensor.from_local(value, spec.mesh, [Replicate()] * spec.mesh.ndim, run_check=False)

    @override
    def _state_in(self, value: Any, p: Tensor) -> Any:
        return _whole(value) if isinstance(value, DTensor) else value


class LocalParts(_Handing):
    """Steps an optimizer on this rank's parts of the parameters and gradients, as plain tensors; nothing is sent.

    Right for optimizers that treat each element by itself, such as ``torch.optim.Rprop``; wrong for all that look at a
    row, a norm, a mean or a number of elements: use `WholeTensors` for those. Those that are known are refused; of a
    class of your own nobody knows, and nothing is said.

    Args:
        kind: the class of the optimizer, or a function that makes one, called with groups of plain parameters.
        params: of the sharded model, as ``kind`` takes them: parameters or groups.
        **settings: further arguments of ``kind``.

    Raises:
        NotSupportedError: ``kind`` is known to look at more than single elements, of which this rank has a part.
    """

    def __init__(self, kind: Callable[..., Optimizer], params: Iterable[Any], **settings: Any) -> None:
        super().__init__(kind, params, False, settings)
        whole = next((inner for inner, _ in self._inner if looks_at_wholes(inner)), None)
        if whole is not None and any(local_tensor(p).shape != p.shape for p in self._stand_ins):
            name = type(whole).__name__
            raise NotSupportedError(
                f"LocalParts({name}): {name} looks at more than single elements, and this rank has a part of the "
                f"parameters, so that its steps would be wrong. Use shardcore_loop.WholeTensors({name}, ...)"
            )

    @override
    def _between_steps(self, p: Tensor) -> Tensor:
        return local_tensor(p).detach()

    @override
    def _plain(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor) and any(isinstance(way, Partial) for way in tensor.placements):
            raise ConfigError(
                "LocalParts.step with partial gradients: call shardcore.reduce_partial_gradients(model) after the last "
                "backward"
            )
        return local_tensor(tensor).detach()

    @override
    def _give_back(self, mine: list[Tensor]) -> None:
        for p in mine:
            part, stand_in = local_tensor(p).detach(), self._stand_ins[p].detach()
            if part.data_ptr() != stand_in.data_ptr():  # it was given another tensor
                part.copy_(stand_in)
        torch.autograd.graph.increment_version(mine)

    @override
    def _state_out(self, value: Any, p: Tensor) -> Any:
        if not isinstance(p, DTensor) or not isinstance(value, Tensor) or value.shape != local_tensor(p).shape:
            return value
        return with_spec(value, spec_of(p)) if value.dtype == p.dtype else laid_out(value, p)

    @override
    def _state_in(self, value: Any, p: Tensor) -> Any:
        if isinstance(p, DTensor) and isinstance(value, Tensor) and value.shape == p.shape:
            value = value if isinstance(value, DTensor) else part_of(value, p)
        return local_tensor(value) if isinstance(value, Tensor) else value


def _whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor that nobody else writes."""
    whole = tensor.detach()
    return whole.full_tensor().clone() if isinstance(whole, DTensor) else whole.clone()


def _mean(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    """Return the mean of a loss over the ranks that share the parameters, so that all of them decide alike."""
    spec = next((spec for spec in map(spec_of, parameters) if spec is not None), None)
    if spec is None:
        return loss
    ways = [Partial("avg")] * spec.mesh.ndim
    local = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return DTensor.from_local(local.detach(), spec.mesh, ways, run_check=False).full_tensor()


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups as torch's optimizers take them, each with a list."""
    found: list[Any] = [params] if isinstance(params, Tensor | Mapping) else list(params)
    if not found:
        raise ConfigError("an optimizer got an empty list of parameters")
    groups = found if isinstance(found[0], Mapping) else [{"params": found}]
    return [{**group, "params": _listed(group["params"])} for group in groups]
