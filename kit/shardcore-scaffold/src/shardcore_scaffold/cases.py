"""The cases of a new pack: the small model that was looked at, as a program."""

from __future__ import annotations

import contextlib
import copy
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.errors import ShardcoreError
from shardcore.plan.shard_plan import ShardPlan
from shardcore_planner.communication import collectives, gathers_of_heads
from shardcore_scaffold.arguments import FIXED
from shardcore_scaffold.calls import FIRST_WORD
from shardcore_scaffold.draft import Draft, plan_of
from shardcore_scaffold.stages import stacks
from shardcore_testing.cases import Supports
from shardcore_testing.checks_plan import whole_linears
from shardcore_testing.islands import in_float64
from shardcore_testing.subject import checkpointing

_SIZES = (1, 2, 3, 4)
_WIDTH = 120


@dataclass(frozen=True)
class Example:
    """A small model, and how it is called.

    Attributes:
        model: small, in float64 on the CPU, without dropout.
        inputs: the keyword arguments of one call.
        settings: the fields of its configuration that make it small; None for a model without one.
        live: it can be built with dropouts, which draw.
        std: the standard deviation of the random parameters of the case.
        tolerance: of the case.
        source: ``module:function`` that makes the model and its arguments, for a model without a configuration.
        unseen: modules that models of the class have, and this one has not.
        text: it can be called with what `shardcore_testing.text_batch` makes for it.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any] | None = None
    live: bool = True
    std: float = 0.2
    tolerance: float = 1e-12
    source: str = ""
    unseen: Sequence[str] = ()
    text: bool = False


@in_float64()
def cases(short: str, example: Example, draft: Draft) -> str:
    """Return the module of cases.

    Args:
        short: the name of the pack without ``shard-``.
        example: the small model.
        draft: the policy.
    """
    model, inputs, settings, origin = example.model, example.inputs, example.settings, example.source
    cls = type(model)
    text = settings is not None and "input_ids" in inputs and "decoder_input_ids" not in inputs and example.text
    with torch.no_grad():
        out = model(**inputs)
    loss, of_loss = _loss(out)
    lines = [
        '"""The tiny models on which the conformance kit tests this pack."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        *([] if text or settings is None else ["import torch"]),
        "from torch import Tensor" if settings is not None else "from torch import Tensor, nn",
    ]
    if settings is not None:
        lines.append(f"from {cls.__module__} import {cls.__name__}")
        kit = ["tiny", *(["text_batch"] if text else [])]
    else:
        module, _, function = origin.partition(":")
        lines.append(f"from {module} import {function}")
        kit = ["randomized"]
    names = ", ".join(["Case", "Supports", *sorted({*kit, *([of_loss] if of_loss else [])})])
    lines += ["", f"from shardcore_testing import {names}", "", '__all__ = ["cases"]', ""]
    lines += _build(example)
    lines += ["", "", *_inputs(cls, inputs, settings, text, origin)]
    if loss not in ("", of_loss):
        about = '    """Return the loss of what a call returned."""'
        lines += ["", "", "def loss(out: Any) -> Tensor:", about, f"    return {loss}"]
    supports = _supports(model, draft, example.live)
    given = of_loss if loss == of_loss else loss and "loss"
    lines += ["", "", *_cases(short, example, out, draft, supports, loss=given)]
    return "\n".join(lines) + "\n"


def _loss(out: Any) -> tuple[str, str]:
    """Return the loss of what a model returned, as an expression of ``out``, and what of the kit it needs.

    Both are empty where the output ``loss`` is one, and the same where a function of the kit is.
    """
    if isinstance(out, Mapping):
        numbers = [f'out["{name}"]' for name, value in out.items() if _is_number(value)]
        numbers += [f'*out["{name}"]' for name, value in out.items() if _are_numbers(value)]
        hidden = "last_hidden_state" in out or not numbers
        return ("", "") if "loss" in out else ("hidden_loss",) * 2 if hidden else _mean(numbers)
    if isinstance(out, list | tuple):
        first = bool(out) and _is_number(out[0]) and out[0].ndim == 0
        return ("out[0]", "") if first else _mean([f"out[{at}]" for at, value in enumerate(out) if _is_number(value)])
    return ("weighted_mean",) * 2 if _is_number(out) else ("hidden_loss",) * 2


def _mean(numbers: Sequence[str]) -> tuple[str, str]:
    return f"weighted_mean({', '.join(numbers)})", "weighted_mean"


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _build(example: Example) -> Iterable[str]:
    settings, cls = example.settings, type(example.model)
    if settings is None:
        return [
            "",
            "def build(**options: Any) -> nn.Module:",
            '    """Return a small model whose every parameter is random, the same in every process."""',
            f"    return randomized({example.source.partition(':')[2]}(**options)[0])",
        ]
    std = f", std={example.std}" if example.std != Example.std else ""
    return [
        "# EDIT: switches of the configuration that change what is computed deserve cases of their own.",
        "SETTINGS: dict[str, Any] = {",
        *(f"    {_quoted(name)}: {_quoted(value)}," for name, value in settings.items()),
        "}",
        "",
        "",
        f"def build(*, dropout: float = 0.0, **options: Any) -> {cls.__name__}:",
        '    """Return a tiny model whose every parameter is random, the same in every process."""',
        f"    return tiny({cls.__name__}, dropout=dropout{std}, **{{**SETTINGS, **options}})",
    ]


def _quoted(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def _inputs(
    cls: type[nn.Module], inputs: Mapping[str, Any], settings: Mapping[str, Any] | None, text: bool, origin: str
) -> Iterable[str]:
    kind = cls.__name__ if settings is not None else "nn.Module"
    head = [
        f"def inputs(model: {kind}, seed: int) -> dict[str, Tensor]:",
        '    """Return the arguments of one call."""',
    ]
    if settings is None:
        return [*head, f"    return {origin.partition(':')[2]}(seed=seed)[1]"]
    if text:
        return [*head, "    return text_batch(model, seed)"]
    body = []
    for name, value in inputs.items():
        line = f'"{name}": {_value(name, value)},'
        body += textwrap.wrap(line, 100, break_long_words=False, subsequent_indent="    ")
    return [
        *head,
        "    generator = torch.Generator().manual_seed(seed)",
        "    return {",
        *textwrap.indent("\n".join(body), "        ").split("\n"),
        "    }",
    ]


def _value(name: str, value: Any) -> str:
    """Return an argument as a program writes it: numbers and words are drawn, the places of images stay."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_floating_point() and name not in FIXED:
        return f"torch.randn({_shape(value)}, generator=generator, dtype=torch.float64)"
    if not name.endswith("input_ids") and name != "labels":
        return _literal(value)
    words = value[value >= FIRST_WORD] if name != "labels" else value
    low, high = int((words if len(words) else value).min()), int(value.max()) + 1
    drawn = f"torch.randint({low}, {high}, ({_shape(value)},), generator=generator)"
    kept = value.where(value < low, torch.full_like(value, -1))
    return drawn if bool((kept < 0).all()) else f"torch.where(({_literal(kept)}) < 0, {drawn}, {_literal(kept)})"


def _literal(value: Tensor) -> str:
    """Return a tensor as a program writes it, on one long line."""
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return f"torch.full(({_shape(value)},), {value.flatten()[0].item()}, dtype={value.dtype})"
    return f"torch.tensor({value.tolist()}, dtype={value.dtype})"


def _shape(value: Tensor) -> str:
    return ", ".join(map(str, value.shape))


def _supports(model: Any, draft: Draft, live: bool) -> list[str]:
    """Return the arguments of ``Supports``: what the class, the draft and its plans allow."""
    sizes = [size for size in _SIZES if _plan(model, draft, size)]
    generates = hasattr(model, "can_generate") and model.can_generate() and "generation" not in draft.closed
    found = [f"generation={generates}"]
    found += ["sequence=True"] if draft.sequence else []
    found += ["experts=True"] if _plan(model, draft, 2, dp=2, ep=2) else []
    recomputes = getattr(model, "supports_gradient_checkpointing", hasattr(model, "gradient_checkpointing_enable"))
    found += [] if recomputes and "checkpointing" not in draft.closed else ["checkpointing=False"]
    found += ["reentrant=False"] if "reentrant" in draft.closed else []
    found += [] if live else ["dropout=False"]
    found += [] if draft.stages else ["pipeline=False"]
    found += [f"captured={draft.captured!r}"] if draft.captured else []
    return found + ([f"tensor_parallel={tuple(sizes)!r}"] if tuple(sizes) != Supports().tensor_parallel else [])


def _cases(
    short: str, example: Example, out: Any, draft: Draft, supports: Sequence[str], *, loss: str
) -> Iterable[str]:
    model: Any = example.model
    named = out.items() if isinstance(out, Mapping) else ()
    outputs = tuple(
        name
        for name, value in named
        if isinstance(value, Tensor) and (name == "last_hidden_state" or name.endswith("logits"))
    )
    given = [f'name="{short}"', "build=build", "inputs=inputs"]
    given += [f"loss={loss}"] if loss else []
    given += [f"outputs={outputs!r}"] if outputs else []
    given += [f"options={options!r}"] if (options := _options(model, draft)) else []
    if above := _counted(model, draft):
        given.append(f'layers="{above}"')
        if (cost := _cost(model, draft, above)) is not None and cost != (2, 2):
            given.append(f"collectives={cost!r}")
    names = whole_linears(plan, model, above, 2) if (plan := _plan(model, draft, 2)) else ()
    whole = sorted({_within(name, draft) for name in names})
    given += [f"whole={tuple(whole)!r}"] if whole else []
    given += [f"tolerance={example.tolerance:.0e}"] if example.tolerance != Example.tolerance else []
    line = f"supports=Supports({', '.join(supports)})"
    lines = "".join(f"                {support},\n" for support in supports)
    given.append(line if len(line) < _WIDTH - 14 else f"supports=Supports(\n{lines}            )")
    return [
        "def cases() -> list[Case]:",
        '    """Return the cases of this pack."""',
        "    return [",
        "        Case(",
        *(f"            {argument},".replace("'", '"') for argument in given),
        "        ),",
        "    ]",
    ]


def _options(model: nn.Module, draft: Draft) -> dict[str, tuple[str, ...]]:
    """Return the attention that a model of the class has by itself, and the one that returns weights, if it is another.

    The small model that was looked at has the latter.
    """
    another = getattr(type(model), "_supports_sdpa", False)
    return {"attn_implementation": ("sdpa", "eager")} if "attentions" in draft.captured and another else {}


def _within(name: str, draft: Draft) -> str:
    """Return the name of a linear below its block."""
    above = next((place for place in draft.lists if name.startswith(f"{place}.")), "")
    return name[len(above) + 1 :].partition(".")[2] if above else name


def _plan(model: nn.Module, draft: Draft, ranks: int, **fields: int) -> ShardPlan | None:
    """Return the plan for so many ranks, if there is one."""
    try:
        return plan_of(model, draft, ranks, **fields)
    except ShardcoreError:
        return None


def _counted(model: nn.Module, draft: Draft) -> str:
    """Return the list whose blocks are counted: one of several, which are recomputed if any are."""
    again = copy.deepcopy(model)
    with contextlib.suppress(Exception):  # it cannot be
        checkpointing(again, {"use_reentrant": False})
    lists = [(name, list(again.get_submodule(name).children())) for name in (*draft.lists, *stacks(model))]
    found = [
        (not getattr(blocks[0], "gradient_checkpointing", False), name) for name, blocks in lists if len(blocks) > 1
    ]
    return min(found, key=lambda each: each[0])[1] if found else ""


def _cost(model: nn.Module, draft: Draft, above: str) -> tuple[int, int] | None:
    """Return the most collectives of a block of a list, forward and backward, as a `Case` counts them."""
    plan = _plan(model, draft, 2)
    if plan is None:
        return None
    found: dict[str, list[int]] = {}
    for collective in collectives(plan):
        if collective.where.startswith(f"{above}."):
            block = collective.where[len(above) + 1 :].partition(".")[0]
            found.setdefault(block, [0, 0])[collective.phase != "forward"] += 1
    own = [
        [number - gathers_of_heads(plan, f"{above}.{block}") for number in numbers] for block, numbers in found.items()
    ]
    return (max(f for f, _ in own), max(b for _, b in own)) if own else None
