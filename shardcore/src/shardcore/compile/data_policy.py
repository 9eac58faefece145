"""Policies written as data: words for paths, as plans of torch (``parallelize_plan``) and of models (``tp_plan``) are.

The words become the rules that the author of a policy would write for the modules at these paths, so that all their
checks hold. Column linears and the row linear that follows them become one region. Whether it is an attention, which is
cut between heads, is not told by names of linears: heads are counted by attributes of the module that holds them, and a
module that counts none is tried on random numbers.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from typing_extensions import override

from shardcore.compile.builder import RuleScope
from shardcore.compile.mixing import LinearAt, mixed, read_by
from shardcore.nn.linear.alike import Product, product_of
from shardcore.plan.steps.base import above
from shardcore.policy import HeadCounts, Heads, ModulePolicy, Policy, Rule, Scope, Stages, Word
from shardcore.styles import layers
from shardcore.styles._finding import is_in, joined
from shardcore.styles.models import head
from shardcore.styles.regions import region

#: Column linears by themselves; in no block one scores words.
_GATHERED = ("colwise_gather_output", "colwise_rep")
#: What each word says of a module by itself; None for those that make regions.
_WORDS: dict[str, Callable[..., Rule] | None] = {
    "colwise": None,
    "rowwise": None,
    "pairwise": None,
    **dict.fromkeys(_GATHERED, functools.partial(layers.col, gather_output=True)),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), functools.partial(layers.row, parallel_input=False)),
    "embedding_rowwise": layers.vocab,
    "replicate": layers.replicate,
    "replicated_with_grad_allreduce": layers.partial,
}
_FUSED = (
    "it does not say in which order features lie",
    "give the block a rule region(col=segments(...)) or experts(...)",
)
_EXPERTS = ("experts are split together with their router", "give the block that routes a rule experts(...)")
_LOCAL = ("nothing says what is summed, and where", "give the module a rule of shardcore.styles, such as by_heads(...)")
#: Words of such plans that say too little to be served: why, and what to do.
_REFUSED = {
    "sequence_parallel": (
        "tokens are split between two modules, not at a norm",
        "leave it out; give the module that runs the blocks sequence(...), and set enable_sequence_parallelism=True",
    ),
    "embedding_colwise": ("embeddings are split over the vocabulary alone", "say 'embedding_rowwise'"),
    "mla_kv_a_proj": ("its output goes two ways into the heads", "give the block a rule region(...) that it enters"),
    **dict.fromkeys(("packed_colwise", "packed_rowwise"), _FUSED),
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "grouped_gemm"), _EXPERTS),
    **dict.fromkeys(("ep_router", "ep_dispatch_experts"), _EXPERTS),
    **dict.fromkeys(("all_reduce", "local_params", "local_colwise", "local_rowwise", "local"), _LOCAL),
}
#: How attention calls the numbers that its forward reads, and what each of them is on one rank.
_COUNTS = {
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads", "n_head", "heads"), layers.local_heads),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), layers.local_kv_heads),
    **dict.fromkeys(("num_key_value_groups", "n_rep"), layers.local_groups),
}
_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head")


class DataPolicy(Policy):
    """A policy made of a mapping, as `shardcore.shard` makes it of one that is given as ``policy``.

    Args:
        data: path of modules -> a word (``"colwise"``), the style of `torch.distributed.tensor.parallel` that says the
            same, a rule of `shardcore.styles` for that module, `Heads` for an attention whose module does not count
            them, or a list of these; at the path ``""``, which is the model, `Stages` too. In a path ``*`` stands for
            any name. What no path names is replicated.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__()
        self.data = dict(data)

    @override
    def module_policy(self) -> ModulePolicy:
        words = _Words(self.model, ranks=max(2, self.shard_config.tensor_parallel_size or 1))
        for key, values in self.data.items():
            for value in values if isinstance(values, list | tuple) else (values,):
                words.take(key, value)
        words.make_regions()
        if not self.data:
            words.unfit("", "policy={}", "it names no module, so that nothing would be split", "name the linears")
        # What a class of policies says of all its models is found for this one.
        self.__dict__.update(checks=() if words.heads is None else (words.heads,), stages=words.stages)
        own = words.rules.pop(self.model, [])
        rest = Word(text="(what no path names is replicated)", planned=_replicate_rest)
        return {**words.rules, self.model: [*own, rest]}


def policy_of(data: Mapping[str, Any], base: type[Policy] = Policy) -> Policy:
    """Return the `DataPolicy` of ``data``; it is a ``base`` too, as all policies for models of a library are."""
    kind: Any = DataPolicy if base is Policy else type("DataPolicy", (DataPolicy, base), {"__module__": __name__})
    policy: Policy = kind(data)
    return policy


def _replicate_rest(scope: Scope) -> None:
    """Replicate every parameter that no other rule has claimed; planned last."""
    assert isinstance(scope, RuleScope)  # for the type: it knows the claims
    names = [name for name, _ in scope.module.named_parameters(remove_duplicate=False)]
    claimed = scope.builder.claims.keys()
    rest = [n for n in names if joined(scope.name(_owner(n)), n.rpartition(".")[2]) not in claimed]
    layers.replicate(*rest).plan(scope)


@dataclass
class _Words:
    """What is said of one model: rules by the module that they are for, and the linears that become regions."""

    model: nn.Module
    ranks: int
    rules: dict[nn.Module, list[Rule]] = field(default_factory=lambda: defaultdict(list))
    heads: Heads | None = None
    stages: Stages | None = None
    columns: dict[str, LinearAt] = field(default_factory=dict)
    rows: dict[str, LinearAt] = field(default_factory=dict)
    counted: dict[str, Heads] = field(default_factory=dict)  # by the path of an attention
    said: dict[str, str] = field(default_factory=dict)  # the entry that names each path

    def unfit(self, where: str, said: str, what: str, todo: str) -> None:
        """Record what is wrong with an entry, to be reported with all that is wrong with the policy."""
        self.rules[self.model].append(Word(text=said, planned=lambda scope: scope.problem(what, todo, where)))

    def take(self, key: str, value: object) -> None:
        """Take one value for the modules, or parameters, that a key names."""
        word = _word(value) if isinstance(value, ParallelStyle) else str(value)
        said = f"{key!r}: {value!r}"
        modules = dict(self.model.named_modules(remove_duplicate=False))
        names = [*modules, *(name for name, _ in self.model.named_parameters(remove_duplicate=False))]
        form = re.compile(re.escape(key).replace(r"\*", "[^.]*"))
        paths = [name for name in names if form.fullmatch(name)]
        if not paths:
            self.unfit("", said, f"{type(self.model).__name__} has no module {key!r}", _near(key, names))
        for path in paths:
            if isinstance(value, Rule) and path in modules:
                self.rules[modules[path]].append(value)
            elif isinstance(value, Heads) and path in modules:
                self.counted[path] = value
            elif isinstance(value, Stages) and path == "":
                self.stages = value
            elif path in self.said:
                self.unfit(path, said, f"{self.said[path]} names it too", "keep one of them")
            elif word in _REFUSED:
                self.unfit(path, said, f"{word!r} cannot be served: {_REFUSED[word][0]}", _REFUSED[word][1])
            elif word not in _WORDS:
                self.unfit(path, said, "it is no word, and no rule for this", _near(word, list(_WORDS)))
            else:
                self.said[path] = said
                self._take_word(path, modules.get(path), word, said)

    def _take_word(self, path: str, module: nn.Module | None, word: str, said: str) -> None:
        make = layers.vocab if isinstance(module, nn.Embedding) and word.startswith("rowwise") else _WORDS[word]
        if word in _GATHERED and not any(part.isdigit() for part in path.split(".")):
            make = head  # in no block: it scores words, and with parallel_output its logits stay split
        if module is None and make not in (layers.replicate, layers.partial):
            self.unfit(path, said, "it is a parameter, and no module", "name its module, or give that by_heads(...)")
        elif make is not None:
            owner, _, name = path.rpartition(".") if module is None else (path, "", "")
            self.rules[self.model.get_submodule(owner)].append(replace(make(name), text=said))
        elif module is not None and word == "pairwise":
            self._take_pair(path, module, said)
        elif isinstance(sizes := product_of(self.model.get_submodule(path)), str):
            self.unfit(path, said, f"it is no linear: {sizes}", "say 'replicate', or give it a rule")
        else:
            (self.rows if word == "rowwise" else self.columns)[path] = LinearAt(path, sizes, said)

    def _take_pair(self, path: str, module: nn.Module, said: str) -> None:
        """Find out which of the linears of a feed-forward is its last."""
        below = [(joined(path, name), product_of(child)) for name, child in module.named_children()]
        linears = [LinearAt(name, sizes, said) for name, sizes in below if isinstance(sizes, Product)]
        ends = [last for last in linears if not mixed(module, [c for c in linears if c is not last], last, self.ranks)]
        if len(ends) != 1:
            what = f"of its linears ({', '.join(c.path for c in linears) or 'none'}) {len(ends)} can be the last"
            self.unfit(path, said, what, "say 'colwise' and 'rowwise' of its linears, or give it a rule region(...)")
            return
        self.rows[ends[0].path] = ends[0]
        self.columns.update({linear.path: linear for linear in linears if linear is not ends[0]})

    def make_regions(self) -> None:
        """Make a region of each row linear, the deepest first, and the column linears that are nearest to it."""
        left = dict(self.columns)
        for path, last in sorted(self.rows.items(), key=lambda item: -item[0].count(".")):
            near = ([name for name in left if is_in(name, outer)] for outer in above(path))
            columns = [left.pop(name) for name in next(filter(None, near), [])]
            if columns:
                self._make_region(columns, last)
            else:
                self.unfit(path, last.said, "no 'colwise' linear leads to it", "name one, or say 'rowwise_split_input'")
        for path, column in left.items():
            todo = "name the 'rowwise' linear that follows, or say 'colwise_gather_output'"
            self.unfit(path, column.said, "its output stays split, and nothing puts it together", todo)

    def _make_region(self, columns: Sequence[LinearAt], last: LinearAt) -> None:
        owners = dict.fromkeys(_owner(column.path) for column in columns)
        owner, said = next(iter(owners)), ", ".join(dict.fromkeys(linear.said for linear in (*columns, last)))
        module, counts = self.model.get_submodule(owner), self._counts(owner, columns, last)
        why = counts if isinstance(counts, str) else None
        if len(owners) > 1:
            why = f"{', '.join(owners)} hold the linears that lead to {last.path}"
        elif counts is None:
            elsewhere = f"{last.path} is elsewhere" if owner != _owner(last.path) else None
            why = elsewhere or mixed(module, columns, last, self.ranks)
        if why is not None:
            todo = "give the block a rule region(enter=, col=, row=); an attention's also has heads=, beside a rule "
            todo += "attribute(name, per_rank) for their number, and segments(...) for several projections in a linear"
            self.unfit(owner, said, f"{type(module).__name__} cannot be cut by that: {why}", todo)
            return
        block = next(outer for outer in above(last.path) if is_in(columns[0].path, outer))
        if block and not isinstance(self.model.get_submodule(_owner(block)), nn.ModuleList):
            block = _owner(block)  # a block itself is not entered: its residual connection is inside of it
        entered, *starts, end = (_below(path, block) for path in (owner, *(c.path for c in columns), last.path))
        kv = [start for c, start in zip(columns, starts, strict=True) if c.sizes.out_features < last.sizes.in_features]
        rule = region(
            enter=entered if entered and len(starts) > 1 else None,
            col=tuple(start for start in starts if start not in kv),
            kv=tuple(kv),
            row=end,
            unit="head" if counts else "column",
        )
        numbers = [name for name in vars(module) if name in _COUNTS] if counts else []
        set_ = [layers.attribute(joined(entered, name), _COUNTS[name]) for name in numbers]
        self.rules[self.model.get_submodule(block)] += [replace(rule, text=said), *set_]

    def _counts(self, owner: str, columns: Sequence[LinearAt], last: LinearAt) -> HeadCounts | str | None:
        """Return the numbers of heads of an attention, None if it is none, or why they cannot be counted."""
        module, width, given = self.model.get_submodule(owner), last.sizes.in_features, self.counted.get(owner)
        numbers = {n: v for n, v in vars(module).items() if type(v) is int and ("head" in n or n in _COUNTS)}
        if given is None and not numbers:
            return None
        asked = None if given is None else given.counts(self.model, 1)
        found = [asked.query] if asked else [v for n, v in numbers.items() if _COUNTS.get(n) is layers.local_heads]
        found += [width // numbers[name] for name in _SIZES if numbers.get(name)]
        query = found[0] if found else 0
        size = width // query if query else 0
        if query * size != width or any(numbers.get(name, size) != size for name in _SIZES):
            return f"its {', '.join(numbers) or 'Heads'} count no heads in the {width} features of {last.path}"
        kv = min(column.sizes.out_features for column in columns) // size
        if not kv or query % kv or any(c.sizes.out_features not in (query * size, kv * size) for c in columns):
            named = ", ".join(f"{c.path} ({c.sizes.out_features})" for c in columns)
            return f"{named} are not each queries, keys or values of {query} heads with {size} features"
        whole = HeadCounts(query=query, kv=kv, ranks=1)
        # Numbers that are something else than their names say, or that no name says, and what is read from elsewhere.
        unknown = [n for n, v in numbers.items() if n in _COUNTS and _COUNTS[n](whole) != v]
        unknown += [n for n, v in numbers.items() if n not in (*_COUNTS, *_SIZES) and v in (query, kv, query // kv)]
        unknown += sorted(read_by(module) & _COUNTS.keys() - vars(module).keys())
        if _COUNTS.keys().isdisjoint(numbers):  # its forward may know the number by any name; that of a layer differs
            alike = [vars(other) for other in self.model.modules() if type(other) is type(module)]
            same = {n for n, v in vars(module).items() if type(v) is int and v > 1 and v in (query, kv)}
            same &= read_by(module) - numbers.keys()
            unknown += sorted(n for n in same if len({each.get(n) for each in alike}) == 1)
        if unknown:
            return f"nothing says what {', '.join(unknown)}, which it reads, is on one rank"
        self.heads = self.heads or given or Heads(query, kv=kv)
        known = self.heads.counts(self.model, 1)
        return whole if known == whole else f"it has {query} heads ({kv} of keys and values), others have not"


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _below(path: str, outer: str) -> str:
    return "" if path == outer else path.removeprefix(f"{outer}." if outer else "")


def _near(name: str, names: Sequence[str]) -> str:
    """Return what to say in the place of a name that is none of these."""
    number = re.compile(r"(?<=\.)\d+(?=\.|$)")
    forms, form = list(dict.fromkeys(number.sub("*", known) for known in names if known)), number.sub("*", name)
    near = [known for known in forms if known.endswith(f".{form}")] or difflib.get_close_matches(form, forms, n=1)
    return f"did you mean {near[0]!r}?" if near else f"say one of {', '.join(forms[:20])}"


def _word(style: ParallelStyle) -> str:
    """Return the word for a style of torch, or the style as text if none says the same."""
    if type(style) is SequenceParallel:
        return "sequence_parallel"
    whole, split = (Replicate(),), (Shard(-1),)
    words: dict[Any, str] = {
        (ColwiseParallel, whole, split): "colwise",
        (ColwiseParallel, whole, whole): "colwise_gather_output",
        (RowwiseParallel, split, whole): "rowwise",
        (RowwiseParallel, whole, whole): "rowwise_split_input",
    }
    layouts = (type(style), *(getattr(style, name, None) for name in ("input_layouts", "output_layouts")))
    return words.get(layouts if getattr(style, "use_local_output", False) else None, str(style))
