"""A policy as text: rows by class, checks and stages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.plan.shard_plan import ShardPlan
from shardcore.plugins.registry import default_registry
from shardcore.policy import Policy


@dataclass
class Draft:
    """A policy as text.

    Attributes:
        rows: lines of rows by the name of the class that they are listed under.
        checks: the check of heads, or empty.
        stages: the names in each part of ``Stages``.
        words: the words of `shardcore.styles` that the rules use.
        doubts: what the author has to look at, in words.
        regions: whether each region that was found, by class and row linear, is one of heads.
        split: those of them that are split.
        lists: the lists of blocks.
        sequence: whether tokens may be split.
        captured: what the model can be asked for, which a rule gathers.
        heads: in how many parts at most regions of heads can be cut, where the model's own number is not used.
        packs: distributions that serve models inside, to which these are left.
        closed: capabilities of the class that the pack does not claim.
    """

    rows: dict[str, list[str]] = field(default_factory=dict)
    checks: str = ""
    stages: dict[str, list[str]] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)
    regions: dict[tuple[str, str], bool] = field(default_factory=dict)
    split: set[tuple[str, str]] = field(default_factory=set)
    lists: list[str] = field(default_factory=list)
    sequence: bool = False
    captured: tuple[str, ...] = ()
    heads: set[int] = field(default_factory=set)
    packs: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)

    def add(self, cls: str, word: str, row: str) -> None:
        """List a rule once."""
        self.words.add(word)
        self.words |= {name for name in ("attribute", "segments") if f"{name}(" in row}
        rows = self.rows.setdefault(cls, [])
        if row not in rows:
            rows.append(row)


def called(word: str, **arguments: str) -> str:
    """Return the call of a word, on one line, or on several if it is long; arguments that are empty are left out."""
    given = {key: value for key, value in arguments.items() if value}
    text = ", ".join(f"{key}={value}" for key, value in given.items())
    if len(text) < 80:
        return f"{word}({text}),"
    inside = "\n".join(f"    {key}={value}," for key, value in given.items())
    return f"{word}(\n{inside}\n),"


def names_in(names: list[str]) -> str:
    """Return names, or calls, as an argument: one of them, or a tuple."""
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else ""


def optional(text: str) -> str:
    """Return a rule that may match nothing."""
    head, _, tail = text.rpartition(")")
    return f"{head}    optional=True,\n){tail}" if head.endswith("\n") else f"{head}, optional=True){tail}"


def lines(draft: Draft) -> Iterator[str]:
    """Yield the body of ``module_policy``."""
    yield "return {"
    for cls, rows in draft.rows.items():
        found = list(_joined(rows))
        line = f'    "{cls}": [{" ".join(found)[:-1]}],'
        if len(line) <= _LINE and "\n" not in line:
            yield line
            continue
        yield f'    "{cls}": ['
        yield from (f"        {line}" for row in found for line in row.split("\n"))
        yield "    ],"
    yield "}"


_OF_SEVERAL = re.compile(r'(replicate|norm|shared_rng)\("([^"]+)"(.*)\),')  # words of as many names as there are
_LINE = 112  # in the body of a method


def _joined(rows: Sequence[str]) -> Iterator[str]:
    """Yield rows, those that say the same of one name each as one row of several names, as far as a line goes."""
    named = [_OF_SEVERAL.fullmatch(row) for row in rows]
    alike: dict[tuple[str, str], list[str]] = {}
    for one in filter(None, named):
        alike.setdefault((one[1], one[3]), []).append(f'"{one[2]}"')
    for row, found in zip(rows, named, strict=True):
        if found is None:
            yield row
            continue
        word, options = found[1], found[3]
        line = ""
        for name in alike.pop((word, options), []):
            longer = f"{line}, {name}" if line else f"{word}({name}"
            if len(longer) + len(options) > _LINE - 10:  # indented, and closed
                yield f"{line}{options}),"
                longer = f"{word}({name}"
            line = longer
        yield from [f"{line}{options}),"] if line else []


def source(model_class: type[nn.Module], draft: Draft) -> str:
    """Return the module of a policy."""
    transformers = model_class.__module__.partition(".")[0] == "transformers"
    base = "PretrainedPolicy" if transformers else "Policy"
    words = ["ModulePolicy", *(["Stages"] if draft.stages else []), *(["Heads"] if draft.checks else [])]
    words += [] if transformers else ["Policy"]
    body = "\n".join(f"        {line}" for line in lines(draft))
    return (
        f'"""How {model_class.__name__} is sharded."""\n\nfrom __future__ import annotations\n\n'
        f"from shardcore.policy import {', '.join(sorted(words))}\n"
        f"{_imports('shardcore.styles', sorted(draft.words))}\n"
        + ("from shardcore_transformers import PretrainedPolicy\n\n" if transformers else "\n")
        + _doubts(draft)
        + f"\nclass {model_class.__name__}Policy({base}):\n"
        + f'    """Drafted from what a small {model_class.__name__} computes."""\n\n'
        + (f"    checks = {draft.checks}\n" if draft.checks else "")
        + (f"    stages = Stages(\n{_stages(draft)}    )\n" if draft.stages else "")
        + "\n    def module_policy(self) -> ModulePolicy:\n"
        + '        """Return the rows of each class."""\n'
        + body
        + "\n"
    )


def _imports(module: str, names: list[str]) -> str:
    """Return the import of names, on one line if it fits."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 120:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def policy_of(model_class: type[nn.Module], draft: Draft) -> type[Policy]:
    """Return the policy that `source` defines."""
    names: dict[str, Any] = {"__name__": f"{__name__}.{model_class.__name__}"}
    exec(compile(source(model_class, draft), f"<draft for {model_class.__name__}>", "exec"), names)
    found: type[Policy] = names[f"{model_class.__name__}Policy"]
    return found


def plan_of(model: nn.Module, draft: Draft, ranks: int = 2, **fields: Any) -> ShardPlan:
    """Return the plan of a draft for a small model; ``fields`` are those of `ShardConfig`.

    Raises:
        PlanError: there is none for so many ranks.
    """
    config = ShardConfig.of(tp=ranks, **fields).resolve(ranks * fields.get("dp", 1))
    delegates = default_registry().policy_for
    return compile_plan(policy_of(type(model), draft), model, config, device_type="cpu", delegates=delegates)


def _doubts(draft: Draft) -> str:
    if not draft.doubts:
        return ""
    wrapped = (
        textwrap.fill(doubt, 116, initial_indent="#   - ", subsequent_indent="#     ")
        for doubt in dict.fromkeys(draft.doubts)
    )
    return "# Look at:\n" + "\n".join(wrapped) + "\n\n"


def _stages(draft: Draft) -> str:
    """Return the arguments of ``Stages``, a part on each line if it fits, and a name on each line if it does not."""
    text = ""
    for part, names in draft.stages.items():
        quoted = [f'"{name}"' for name in names]
        line = f"        {part}={names_in(quoted)},"
        if len(line) > 120:
            line = "\n".join([f"        {part}=(", *(f"            {name}," for name in quoted), "        ),"])
        text += f"{line}\n"
    return text
