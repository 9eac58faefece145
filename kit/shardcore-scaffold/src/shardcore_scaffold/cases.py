"""The cases of a new pack: the small model that was looked at, as a program."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore_planner.communication import collectives, gathers_of_heads
from shardcore_scaffold.draft import Draft, policy_of

_SIZES = (1, 2, 4)
_WIDTH = 120


def cases(
    short: str,
    model: nn.Module,
    inputs: Mapping[str, Any],
    draft: Draft,
    *,
    settings: Mapping[str, Any] | None = None,
    dropouts: Sequence[str] = (),
    origin: str = "",
    text: bool = False,
) -> str:
    """Return the module of cases.

    Args:
        short: the name of the pack without ``shard-``.
        model: the small model.
        inputs: the arguments of one call.
        draft: the policy.
        settings: the fields of its configuration that make it small; None for a model without one.
        dropouts: those that are dropouts.
        origin: ``module:function`` that makes the model and its arguments, for one without a configuration.
        text: the model can be called with what `shardcore_testing.text_batch` makes for it.
    """
    cls = type(model)
    text = settings is not None and "input_ids" in inputs and "decoder_input_ids" not in inputs and text
    with torch.no_grad():
        out = model(**inputs)
    no_loss = not (isinstance(out, Mapping) and "loss" in out)
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
        kit = f"Case, Supports{', hidden_loss' if no_loss else ''}{', text_batch' if text else ''}, tiny"
    else:
        module, _, function = origin.partition(":")
        lines.append(f"from {module} import {function}")
        kit = "Case, Supports" + (", hidden_loss" if no_loss else "")
    lines += ["", f"from shardcore_testing import {kit}", "", '__all__ = ["cases"]', ""]
    lines += _build(cls, settings, dropouts, origin)
    lines += ["", "", *_inputs(cls, inputs, settings, text, origin)]
    lines += ["", "", *_cases(short, model, out, draft)]
    return "\n".join(lines) + "\n"


def _build(
    cls: type[nn.Module], settings: Mapping[str, Any] | None, dropouts: Sequence[str], origin: str
) -> Iterable[str]:
    if settings is None:
        return [
            "",
            "def build(**options: Any) -> nn.Module:",
            '    """Return a small model with the same parameters in every process."""',
            f"    return {origin.partition(':')[2]}(**options)[0]",
        ]
    shown = "\n".join(
        [
            "{",
            *(f"    {_quoted(name)}: {_quoted(value)}," for name, value in settings.items() if name not in dropouts),
            "}",
        ]
    )
    return [
        "# EDIT: switches of the configuration that change what is computed deserve cases of their own.",
        "SETTINGS: dict[str, Any] = " + shown,
        *_dropouts(dropouts),
        "",
        "",
        f"def build(*, dropout: float = 0.0, **options: Any) -> {cls.__name__}:",
        '    """Return a tiny model whose every parameter is random, the same in every process."""',
        f"    return tiny({cls.__name__}, **{{**SETTINGS, **dict.fromkeys(DROPOUTS, dropout), **options}})",
    ]


def _dropouts(names: Sequence[str]) -> list[str]:
    line = f"DROPOUTS: tuple[str, ...] = {_quoted(tuple(names))}"
    if len(line) <= _WIDTH:
        return [line]
    return ["DROPOUTS: tuple[str, ...] = (", *(f"    {_quoted(name)}," for name in names), ")"]


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
        if isinstance(value, Tensor) and value.is_floating_point():
            body.append(f'"{name}": torch.randn({_shape(value)}, generator=generator, dtype=torch.float64),')
        elif isinstance(value, Tensor) and value.dtype == torch.long:
            low, high = int(value.min()), int(value.max()) + 1
            body.append(f'"{name}": torch.randint({low}, {high}, ({_shape(value)},), generator=generator),')
        elif isinstance(value, Tensor):
            body.append(f'"{name}": torch.ones({_shape(value)}, dtype={value.dtype}),')
        else:
            body.append(f'"{name}": {value!r},')
    return [
        *head,
        "    generator = torch.Generator().manual_seed(seed)",
        "    return {",
        *textwrap.indent("\n".join(body), "        ").split("\n"),
        "    }",
    ]


def _shape(value: Tensor) -> str:
    return ", ".join(map(str, value.shape))


def _cases(short: str, model: Any, out: Any, draft: Draft) -> Iterable[str]:
    named = out.items() if isinstance(out, Mapping) else ()
    outputs = tuple(
        name
        for name, value in named
        if isinstance(value, Tensor) and (name == "last_hidden_state" or name.endswith("logits"))
    )
    sizes = tuple(size for size in _SIZES if all(count % size == 0 for count in draft.heads))
    supports = [f"generation={bool(hasattr(model, 'can_generate') and model.can_generate())}"]
    supports += ["sequence=True"] if draft.sequence else []
    supports += [f"captured={draft.captured!r}"] if draft.captured else []
    supports += [f"tensor_parallel={sizes!r}"] if sizes != _SIZES else []
    given = [f'name="{short}"', "build=build", "inputs=inputs"]
    if not (isinstance(out, Mapping) and "loss" in out):
        given.append("loss=hidden_loss")
    given += [f"outputs={outputs!r}"] if outputs else []
    given += [f"options={options!r}"] if (options := _options(model, draft)) else []
    if draft.lists:
        given.append(f'layers="{draft.lists[0]}"')
        if (cost := _cost(model, draft)) is not None and cost != (2, 2):
            given.append(f"collectives={cost!r}")
    whole = sorted({_within(name, draft) for name in draft.whole})
    given += [f"whole={tuple(whole)!r}"] if whole else []
    given.append(f"supports=Supports({', '.join(supports)})")
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


def _cost(model: nn.Module, draft: Draft) -> tuple[int, int] | None:
    """Return the most collectives of a block of the first list, forward and backward, as a `Case` counts them."""
    plan = compile_plan(policy_of(type(model), draft), model, ShardConfig.of(tp=2).resolve(2), device_type="cpu")
    above = draft.lists[0]
    found: dict[str, list[int]] = {}
    for collective in collectives(plan):
        if collective.where.startswith(f"{above}."):
            block = collective.where[len(above) + 1 :].partition(".")[0]
            found.setdefault(block, [0, 0])[collective.phase != "forward"] += 1
    own = [
        [number - gathers_of_heads(plan, f"{above}.{block}") for number in numbers] for block, numbers in found.items()
    ]
    return (max(f for f, _ in own), max(b for _, b in own)) if own else None
