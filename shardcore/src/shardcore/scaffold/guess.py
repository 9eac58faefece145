"""A first guess of a policy's rules, from names and sizes in the module tree of one model class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from shardcore.errors import ConfigError

__all__ = ["Draft", "guess"]

_ATTENTION = ("attn", "attention")
_ROWS = ("o_proj", "out_proj", "dense", "c_proj", "proj", "wo", "out", "out_lin", "dense_4h_to_h", "fc2", "down_proj")
_KV = ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", "wk", "wv", "k", "v")
_EPS = ("variance_epsilon", "eps", "epsilon")


@dataclass
class Draft:
    """A policy as text.

    Attributes:
        rows: lines of rows by the name of the class that they are listed under.
        checks: the check of heads, or empty.
        stages: the names in each part of ``Stages``.
        words: the words of `shardcore.styles` that the rules use.
        doubts: what the author has to look at, in words.
        heads: the number of heads in the configuration; None if it is not known.
        shares_kv: the configuration counts key/value heads apart.
    """

    rows: dict[str, list[str]] = field(default_factory=dict)
    checks: str = ""
    stages: dict[str, list[str]] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    heads: int | None = None
    shares_kv: bool = False

    def add(self, cls: str, word: str, row: str) -> None:
        """List a rule once."""
        self.words.add(word)
        rows = self.rows.setdefault(cls, [])
        if row not in rows:
            rows.append(row)


def guess(model: nn.Module) -> Draft:
    """Return a first guess for ``model``, which may be on the meta device.

    Raises:
        ConfigError: there is no list of equal blocks in it, so that nothing can be guessed.
    """
    where, blocks = _stack(model)
    draft = Draft(stages=_stages(model, where))
    draft.doubts.append(
        "stages: what stands before the blocks in the model was put into first, what stands after them into last, and "
        "what has buffers only into everywhere. A second list of blocks belongs into blocks too."
    )
    block = blocks[0]
    _check_heads(model, draft)
    covered = _regions(block, type(block).__name__, draft)
    _norms(block, type(block).__name__, covered, draft)
    _rest(block, type(block).__name__, covered, draft)
    _outside(model, blocks, draft)
    return draft


def _stack(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the longest list of modules of one class, and its name."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and len({type(m) for m in module}) == 1
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no nn.ModuleList of equal blocks, from which a policy could be guessed; write "
            "the rules by hand: docs/writing-a-pack.md"
        )
    if len(lists) > 1:
        lists.sort(key=lambda pair: -sum(p.numel() for p in pair[1].parameters()))
    return lists[0]


def _stages(model: nn.Module, where: str) -> dict[str, list[str]]:
    """Return the names of each part, which hold every parameter and buffer once; ``where`` is the list of blocks."""
    first: list[str] = []
    last: list[str] = []
    everywhere: list[str] = []
    owner, above = model, ""
    for part in where.split("."):
        first += [above + name for name, parameter in owner._parameters.items() if parameter is not None]
        everywhere += [above + name for name, buffer in owner._buffers.items() if buffer is not None]
        children = [name for name, _ in owner.named_children()]
        behind: list[str] = []
        for place, name in enumerate(children):
            child = owner.get_submodule(name)
            if name != part and any(True for _ in child.parameters()):
                (first if place < children.index(part) else behind).append(above + name)
            elif name != part and any(True for _ in child.buffers()):
                everywhere.append(above + name)
        last = behind + last  # what is inside runs before what is around it
        owner, above = owner.get_submodule(part), f"{above}{part}."
    parts = {"first": first, "blocks": [where], "last": last, "everywhere": everywhere}
    return {part: names for part, names in parts.items() if names}


def _check_heads(model: nn.Module, draft: Draft) -> None:
    config = getattr(model, "config", None)
    for query in ("num_attention_heads", "n_head", "num_heads", "n_heads"):
        if isinstance(getattr(config, query, None), int):
            draft.heads = getattr(config, query)
            draft.shares_kv = bool(getattr(config, "num_key_value_heads", None))
            kv = ', kv="num_key_value_heads"' if draft.shares_kv else ""
            draft.checks = f'(Heads("{query}"{kv}),)'
            return
    draft.doubts.append("the configuration counts heads under a name that was not recognized: checks is empty")


def _linears(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]


def _regions(block: nn.Module, cls: str, draft: Draft) -> set[str]:
    """Add one region for each part that holds linears; returns the names of the linears that they cover."""
    covered: set[str] = set()
    loose = [(name, m) for name, m in block.named_children() if isinstance(m, nn.Linear)]
    if len(loose) >= 2:
        covered |= _region(cls, "", None, loose, draft)
    for name, child in block.named_children():
        for where, module in _groups(name, child):
            linears = [(f"{where}.{inner}", m) for inner, m in _linears(module) if inner]
            covered |= _region(cls, where, module, linears, draft)
    return covered


def _groups(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold a whole region: the smallest with several linears, or what encloses such ones."""
    inner = [
        (f"{name}.{path}" if path else name, m)
        for path, m in module.named_modules()
        if sum(isinstance(child, nn.Linear) for child in m.children()) >= 2
    ]
    closed = [pair for pair in inner if any(child in _ROWS for child, _ in pair[1].named_children())]
    if closed and len(closed) == len(inner):
        yield from closed
    elif len(_linears(module)) >= 2:
        yield name, module


def _region(
    cls: str, enter: str, module: nn.Module | None, linears: list[tuple[str, nn.Linear]], draft: Draft
) -> set[str]:
    last, end = next(((n, m) for n, m in reversed(linears) if n.rpartition(".")[2] in _ROWS), linears[-1])
    attention = any(word in enter.lower() for word in _ATTENTION)
    columns, kv = [], []
    for name, linear in linears:
        times, remainder = divmod(linear.out_features, end.in_features)
        if name == last:
            continue
        if attention and draft.shares_kv and name.rpartition(".")[2] in _KV:
            kv.append(f'"{name}"')
        elif times == 1 and not remainder:
            columns.append(f'"{name}"')
        elif times > 1 and not remainder:
            columns.append(f'segments("{name}", {times}, by="head")')
            draft.words.add("segments")
            draft.doubts.append(
                f'{cls}: {name} computes {times} projections at once. by="head" is right if its output is viewed as '
                f'(heads, {times} * head size), by="projection" if it is viewed as ({times}, heads, head size).'
            )
        else:
            draft.doubts.append(f"{cls}: {name} ({linear.out_features} outputs) was left out of the region of {last}.")
    if not columns:
        return set()
    parts = {
        "enter": f'"{enter}"' if enter else "",
        "col": _tuple(columns),
        "kv": _tuple(kv) if kv else "",
        "row": f'"{last}"',
    }
    parts["unit"] = '"head"' if attention else ""
    draft.add(cls, "region", _call("region", {key: value for key, value in parts.items() if value}))
    if attention and module is not None:
        _attributes(cls, enter, module, draft)
    return {name for name, _ in linears if any(f'"{name}"' in text for text in (*columns, *kv))} | {last}


def _call(word: str, arguments: dict[str, str]) -> str:
    """Return the call on one line, or on several if it is long."""
    text = ", ".join(f"{key}={value}" for key, value in arguments.items())
    if len(text) < 80:
        return f"{word}({text}),  # guess"
    inside = "\n".join(f"    {key}={value}," for key, value in arguments.items())
    return f"{word}(  # guess\n{inside}\n),"


def _attributes(cls: str, enter: str, module: nn.Module, draft: Draft) -> None:
    """Add a rule for each attribute that counts heads: views by it would be wrong in silence (or not, with -1)."""
    counts = [
        name for name, value in vars(module).items() if value == draft.heads and "heads" in name and name.isidentifier()
    ]
    for name in counts:
        draft.add(cls, "per_rank", f'attribute("{enter}.{name}", per_rank),  # guess')
        draft.words.add("attribute")
    if draft.shares_kv and hasattr(module, "num_key_value_groups"):
        draft.add(cls, "local_groups", f'attribute("{enter}.num_key_value_groups", local_groups),  # guess')
        draft.words.add("attribute")
    if not counts:
        draft.doubts.append(
            f"{cls}: no attribute of {enter} counts heads, so the views in its forward must have -1 where heads are "
            "counted."
        )


def _tuple(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.children())


def _norm(name: str, module: nn.Module) -> str:
    eps = next((a for a in _EPS if isinstance(getattr(module, a, None), float)), None)
    written_out = not isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) and "RMS" in type(module).__name__
    return f'norm("{name}", rms="{eps}"),' if written_out and eps else f'norm("{name}"),'


def _norms(block: nn.Module, cls: str, covered: set[str], draft: Draft) -> None:
    inside = {name.partition(".")[0] for name in covered}
    for name, module in block.named_modules():
        if not _is_norm(module) or not list(module.parameters()):
            continue
        if name.partition(".")[0] in inside and "." in name:
            draft.add(cls, "partial", f'partial("{name}"),  # guess: it normalizes local heads')
        else:
            draft.add(cls, "norm", _norm(name, module))


def _rest(block: nn.Module, cls: str, covered: set[str], draft: Draft) -> None:
    for name, module in block.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if name and own and name not in covered and not _is_norm(module):
            draft.add(cls, "replicate", f'replicate("{name}"),  # guess: nothing better is known')


def _outside(model: nn.Module, blocks: nn.ModuleList, draft: Draft) -> None:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    inside = {id(m) for m in blocks.modules()}
    for owner_name, owner in model.named_modules():
        if id(owner) in inside:
            continue
        cls = type(owner).__name__
        for name, parameter in owner._parameters.items():
            if parameter is not None and not _is_leaf(owner):
                draft.add(cls, "replicate", f'replicate("{name}"),')
        for name, module in owner.named_children():
            if id(module) in inside or not _is_leaf(module) or not list(module.parameters()):
                continue
            draft.add(cls, *_leaf(name, module, vocabulary))
        del owner_name


def _is_leaf(module: nn.Module) -> bool:
    return not list(module.children())


def _leaf(name: str, module: nn.Module, vocabulary: int | None) -> tuple[str, str]:
    """Return the word and the rule for a module without children."""
    if isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary:
        return "vocab", f'vocab("{name}"),'
    if isinstance(module, nn.Linear) and module.out_features == vocabulary:
        return "head", f'head("{name}"),'
    if _is_norm(module):
        return "norm", _norm(name, module)
    return "replicate", f'replicate("{name}"),'


def lines(draft: Draft) -> Iterator[str]:
    """Yield the body of ``module_policy``."""
    yield "return {"
    for cls, rows in draft.rows.items():
        yield f'    "{cls}": ['
        yield from (f"        {line}" for row in rows for line in row.split("\n"))
        yield "    ],"
    yield "}"
