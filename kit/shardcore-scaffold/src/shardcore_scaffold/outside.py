"""The rules for what is in no block: tables of words, heads, and what every rank has whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from shardcore.nn.linear.alike import lookup_problem
from shardcore_scaffold.draft import Draft, optional
from shardcore_scaffold.facts import EPS, Facts

_WORDS = 2 * torch.iinfo(torch.uint8).bits  # fewer are no vocabulary


def add_outside(
    draft: Draft,
    facts: Facts,
    blocks: Collection[str],
    *,
    split: Mapping[str, int | None],
    partial: Collection[str],
    tables: bool = True,
) -> None:
    """Add a rule for everything that is in no block.

    Args:
        draft: gets the rules.
        facts: what is known of the model.
        blocks: the paths of modules that have rules already.
        split: parameters of which the blocks read the entries of their heads, and the dim.
        partial: parameters that the heads of all blocks read.
        tables: split embeddings and heads over the vocabulary.
    """
    _Outside(draft, facts, blocks, split, partial, tables).add()


class _Outside:
    def __init__(
        self,
        draft: Draft,
        facts: Facts,
        blocks: Collection[str],
        split: Mapping[str, int | None],
        partial: Collection[str],
        tables: bool,
    ) -> None:
        self.draft, self.facts, self.modules, self.ties, self.blocks = draft, facts, facts.modules, facts.ties, blocks
        self.split, self.partial = split, partial
        sizes = _vocabularies(getattr(facts.model, "config", None)) or self._scored() if tables else set()
        if tables and not sizes and any(isinstance(module, nn.Embedding) for module in self.modules.values()):
            draft.doubts.append("embeddings and heads are whole: no vocab_size and no head says which have the words")
        self.tables = {name for name, module in self.modules.items() if self._is_table(name, module, sizes)}
        within = (path for path in self.modules if self._inside(path) and not facts.inside(path))
        self.within = {type(self.modules[path]) for path in within}

    def add(self) -> None:
        """Add the rules, under the class of the innermost module whose rules mean nothing else."""
        rules: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        biases = {id(self.modules[table]._parameters.get("bias")) for table in self.tables}
        for path in self.facts.parts:
            owner = self._named_from(path)
            text = f'delegate("{path[len(owner) + 1 if owner else 0 :]}"),'
            rules[type(self.modules[owner]).__name__, "delegate", text].add(owner)
        for path, module in self.modules.items():
            own = {name: p for name, p in module._parameters.items() if p is not None}
            if not own or self._inside(path):
                continue
            if path and not module._modules:
                owner = self._named_from(path)
                name = path[len(owner) + 1 if owner else 0 :]
                found = self._table(name, path, owner) if path in self.tables else self._used(path, name)
                rules[(type(self.modules[owner]).__name__, *(found or leaf(name, module)))].add(owner)
                continue
            owner = self._named_from(f"{path}.x")
            for short, parameter in own.items():
                if id(parameter) not in biases:
                    full = f"{path}.{short}".lstrip(".")
                    name = full[len(owner) + 1 if owner else 0 :]
                    found = self._used(full, name) or ("replicate", f'replicate("{name}"),')
                    rules[(type(self.modules[owner]).__name__, *found)].add(owner)
        for (cls, word, text), owners in rules.items():
            self.draft.add(cls, word, text if owners == self.facts.places(cls) else optional(text))

    def _used(self, path: str, name: str) -> tuple[str, str] | None:
        """Return the rule for a parameter, or a module with one, outside of the blocks in which it is used."""
        own = [n for n in (path, *(f"{path}.{s}" for s in getattr(self.modules.get(path), "_parameters", ()))) if n]
        for full in own:
            if full in self.split:
                dim = self.split[full]
                return "by_heads", f'by_heads("{name}"{f", dim={dim}" if dim else ""}),'
            if full in self.partial:
                return "partial", f'partial("{name}"),'
        return None

    def _named_from(self, path: str) -> str:
        """Return the innermost module around ``path`` whose class has rules that mean nothing else."""
        owner = path.rpartition(".")[0]
        while owner:
            cls = type(self.modules[owner])
            if cls not in self.within and not cls.__module__.startswith("torch."):
                break
            owner = owner.rpartition(".")[0]
        return owner

    def _table(self, name: str, path: str, owner: str) -> tuple[str, str]:
        module = self.modules[path]
        if isinstance(module, nn.Embedding):
            return "vocab", f'vocab("{name}"),'
        around = {id(p): short for short, p in self.modules[owner]._parameters.items() if p is not None}
        bias = around.get(id(module._parameters.get("bias")))
        return "head", f'head("{name}"{f", bias={chr(34)}{bias}{chr(34)}" if bias else ""}),'

    def _scored(self) -> set[int]:
        """Return the rows of tables of a model without a configuration that a linear scores, and none reads."""
        tables = {module.num_embeddings for module in self.modules.values() if isinstance(module, nn.Embedding)}
        linears = [module for module in self.modules.values() if type(module) is nn.Linear]
        found = tables & {each.out_features for each in linears} - {each.in_features for each in linears}
        return {size for size in found if size > _WORDS and not hasattr(self.modules[""], "config")}

    def _inside(self, path: str) -> bool:
        inside = any(path == block or path.startswith(f"{block}.") for block in self.blocks)
        return inside or self.facts.inside(path)

    def _is_table(self, name: str, module: nn.Module, sizes: set[int]) -> bool:
        """Tell whether a module has a row for each word, and can be split with all that its weight is tied to."""
        weight = module._parameters.get("weight")
        if weight is None or self._inside(name):
            return False
        return all(self._can_split(self.modules[tied.rpartition(".")[0]], sizes) for tied in self.ties[weight])

    def _can_split(self, holder: nn.Module, sizes: set[int]) -> bool:
        if isinstance(holder, nn.Embedding):
            return holder.num_embeddings in sizes and lookup_problem(holder) is None
        if type(holder) is not nn.Linear or holder.out_features not in sizes:
            return False
        return holder.bias is None or self._bias_beside(holder.bias)

    def _bias_beside(self, bias: nn.Parameter) -> bool:
        """Tell whether a bias is the linear's alone, or that of the module around it too."""
        names = self.ties[bias]
        above = {name.rpartition(".")[0] for name in names}
        if len(names) == 1:
            return True
        short, long = sorted(above, key=len)[0], sorted(above, key=len)[-1]
        return len(names) == 2 and long.rpartition(".")[0] == short


def leaf(name: str, module: nn.Module) -> tuple[str, str]:
    """Return the word and the rule for a module that is not split."""
    if "norm" in type(module).__name__.lower() and not module._modules:
        eps = next((a for a in EPS if isinstance(getattr(module, a, None), float)), None)
        written_out = (
            not isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) and "RMS" in type(module).__name__
        )
        return "norm", f'norm("{name}", rms="{eps}"),' if written_out and eps else f'norm("{name}"),'
    return "replicate", f'replicate("{name}"),'


def _vocabularies(config: Any, depth: int = 2) -> set[int]:
    """Return the sizes of the vocabularies that a configuration, or one inside of it, names."""
    if config is None or not hasattr(config, "__dict__"):
        return set()
    found = {value for name, value in vars(config).items() if "vocab_size" in name and type(value) is int}
    if depth:
        for value in vars(config).values():
            if type(value).__module__.partition(".")[0] == type(config).__module__.partition(".")[0]:
                found |= _vocabularies(value, depth - 1)
    return {size for size in found if size > _WORDS}
