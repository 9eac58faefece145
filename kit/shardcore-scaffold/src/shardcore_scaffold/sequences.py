"""Between which modules activations can be split along the sequence: where no token is mixed with another.

Regions gather all tokens, so what they do with them does not matter. Everything else from the first block to the norm
after the last one sees the tokens of one rank alone. Whether that is right is read off what depends on what: with the
outputs of the regions taken for constants, a token's states depend on that token's states before, and on no others.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardcore_scaffold.draft import Draft, optional
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.outside import leaf


def add_sequences(draft: Draft, facts: Facts) -> str:
    """Add the rule for each list of blocks of a draft, or none of them; return why there is none, or an empty text."""
    if not draft.lists and not facts.parts:
        return "there is no list of blocks"
    owners = [path.rpartition(".")[0] for path in draft.lists]
    if len(set(owners)) < len(owners):
        return f"{owners[0] or 'the model'} runs several lists of blocks"
    rules: dict[str, dict[str, str]] = {}
    for path, owner in zip(draft.lists, owners, strict=True):
        cls = type(facts.modules[owner])
        if cls.__module__.startswith("torch."):
            return f"{path} is run by no module of the model's own"
        run = _Run(facts, draft, path, owner)
        if problem := run.problem():
            return f"{path}: {problem}"
        name = path[len(owner) + 1 if owner else 0 :]
        text = f'sequence(scatter="{name}[0]", gather="{run.gather or f"{name}[-1]"}"),'
        rules.setdefault(cls.__name__, {})[owner] = text
    for cls_name, texts in rules.items():
        if len(set(texts.values())) > 1:
            return f"the stacks of class {cls_name} end differently"
    for cls_name, texts in rules.items():
        (text,) = set(texts.values())
        draft.add(cls_name, "sequence", text if facts.places(cls_name) == texts.keys() else optional(text))
    for path in facts.modules:  # a sample is dropped as a whole, on all ranks or on none
        block = facts.owner(path) if path.rpartition(".")[2].startswith("drop_path") else None
        if block is not None and any(path.startswith(f"{name}.") for name in draft.lists):
            cls = type(facts.modules[block])
            draft.add(cls.__name__, "shared_rng", f'shared_rng("{path[len(block) + 1 :]}"),')
    return ""


@dataclass
class _Run:
    """One call of the model, of which the states before and after a list of blocks are kept."""

    facts: Facts
    draft: Draft
    path: str  # of the list
    owner: str  # that runs it
    before: list[Tensor] = field(default_factory=list)  # the input of the first block in each call, leaves
    after: list[Tensor] = field(default_factory=list)
    gather: str = ""  # the norm after the last block, from the owner

    def problem(self) -> str:
        """Run it; return why tokens cannot be split, or an empty text."""
        blocks = dict(self.facts.modules[self.path].named_children())
        first, last = next(iter(blocks)), next(reversed(blocks))
        argument = self.facts.dependence.first.get(f"{self.path}.{first}")
        if argument is None:
            return "its first block is called without arguments"
        rows = [
            module
            for name, module in self.facts.modules.items()
            if name.startswith(f"{self.path}.") and self._ends_a_region(name)
        ]
        with ExitStack() as stack:
            for row in rows:
                stack.callback(row.register_forward_hook(_constant).remove)
            stack.callback(blocks[first].register_forward_pre_hook(self._take(argument), with_kwargs=True).remove)
            stack.callback(blocks[last].register_forward_hook(self._keep).remove)
            for name, module in self._norms():
                stack.callback(module.register_forward_pre_hook(self._follows(name)).remove)
                stack.callback(module.register_forward_hook(self._end(name)).remove)
            self.facts.call(self.facts.model)
        if not self.before or len(self.before) != len(self.after):
            return "its first and last blocks are not called alike"
        for before, after in zip(self.before, self.after, strict=True):
            if before.dim() != 3 or after.dim() != 3 or before.shape[:2] != after.shape[:2]:  # (B, T, E)
                return f"its blocks take {tuple(before.shape)} and give {tuple(after.shape)}, which is no sequence"
            if _mixes(before, after):
                return "tokens are mixed outside of the regions that are split"
        return "its blocks draw numbers, which ranks would draw apart" if self._draws(first, last) else ""

    def _draws(self, first: str, last: str) -> bool:
        """Tell whether the blocks draw numbers in training, where dropouts are 0: a router may."""
        states: list[Tensor] = []
        with suppress(Exception):  # of what cannot be called in training, its tests say why
            model = copy.deepcopy(self.facts.model).train()
            blocks = model.get_submodule(self.path)
            blocks.get_submodule(first).register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
            blocks.get_submodule(last).register_forward_hook(lambda *_: states.append(torch.get_rng_state()))
            self.facts.call(model)
        return any(not torch.equal(before, after) for before, after in zip(states[::2], states[1::2], strict=False))

    def _ends_a_region(self, name: str) -> bool:
        return any(
            name.endswith(f".{row}") and type(self.facts.modules[name[: -len(row) - 1]]).__name__ == cls
            for cls, row in self.draft.split
        )

    def _norms(self) -> list[tuple[str, nn.Module]]:
        above = f"{self.owner}." if self.owner else ""
        return [
            (path[len(above) :], module)
            for path, module in self.facts.modules.items()
            if path.startswith(above)
            and not path.startswith(f"{self.path}.")
            and not module._modules
            and leaf("", module)[0] == "norm"
        ]

    def _take(self, argument: str) -> Any:
        def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = args[0] if args else kwargs.get(argument)
            if not isinstance(given, Tensor) or not given.is_floating_point():
                return None
            state = given.detach().requires_grad_()
            self.before.append(state)
            return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, argument: state})

        return take

    def _keep(self, module: nn.Module, args: Any, out: Any) -> None:
        state = out[0] if isinstance(out, tuple) else out
        if isinstance(state, Tensor):
            self.after.append(state)

    def _follows(self, name: str) -> Any:
        def follows(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and self.after and args[0] is self.after[-1]:
                self.gather = name

        return follows

    def _end(self, name: str) -> Any:
        def end(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if self.gather == name and args and self.after and args[0] is self.after[-1]:
                self.after[-1] = out

        return end


def _constant(module: nn.Module, args: Any, out: Any) -> Any:
    return out.detach() if isinstance(out, Tensor) else out


def _mixes(before: Tensor, after: Tensor) -> bool:
    """Tell whether a token after (B, T, F) depends on another one before (B, T, E)."""
    if not after.requires_grad:
        return False
    tokens = before.size(1)
    for token in {0, tokens // 2, tokens - 1}:
        weights = torch.rand(after[:, token].shape, dtype=after.dtype) + 0.5
        (grad,) = torch.autograd.grad((after[:, token] * weights).sum(), before, retain_graph=True, allow_unused=True)
        if grad is not None and bool(grad.abs().sum((0, 2)).index_fill(0, torch.tensor(token), 0.0).any()):
            return True
    return False
