"""Checks of random numbers: dropout masks, replicas that stay equal, generation."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

import shardcore
from shardcore_testing.findings import Ledger
from shardcore_testing.observing import Draws, Replay
from shardcore_testing.parity import equal_on_ranks, gradient_errors, part_of
from shardcore_testing.subject import Subject, checkpointing, flat

DROPOUT = {"dropout": 0.1}
_STEPS = 4  # bits that differ once stay so: the first step shows it, further ones how clipping and moments go on


def dropout(s: Subject, ledger: Ledger) -> None:
    """The unsharded model with the masks that the ranks drew gives the same outputs and gradients (H6, H40).

    Every rank is seeded differently by its user. Masks of replicated activations have to be equal on all ranks, those
    of split ones are put together.
    """
    with ledger.check("dropout"):
        if not s.case.supports.dropout:
            ledger.closed("dropout")
            return
        kinds: list[dict[str, Any] | None] = [None]
        if s.case.supports.checkpointing:
            kinds += [{"use_reentrant": False}] + [{"use_reentrant": True}] * s.case.supports.reentrant
        for kind in kinds:
            with ledger.place(f"checkpointing {kind}" if kind else "plain"):
                _replayed(s, ledger, kind)
        _reproducible(s, ledger)


def _replayed(s: Subject, ledger: Ledger, kind: dict[str, Any] | None) -> None:
    torch.manual_seed(1000 + s.rank)
    reference = s.build(**DROPOUT)
    model = s.shard(copy.deepcopy(reference))
    if kind:
        checkpointing(model, kind)
        model.train()
    for seed in (0, 1):
        inputs = s.inputs(reference, seed)
        with Draws() as draws:
            got = model(**inputs)
        drawn = s.gathered(draws.drawn)  # before the backward: a recomputation draws again
        s.loss(got).backward()
        ledger.true(bool(draws.drawn), "build(dropout=0.1) draws no random numbers; say Supports(dropout=False)")
        counts = {len(of_rank) for of_rank in drawn}
        if not ledger.true(len(counts) == 1, f"ranks draw different numbers of times: {sorted(counts)} (H40)"):
            return
        rows = next(len(value) for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.ndim)
        with Replay(list(zip(*drawn, strict=True)), rows) as replay:
            wanted = reference(**inputs)
        for problem in replay.problems:
            ledger.failed(problem)
        unused = len(draws.drawn) - replay.used
        ledger.true(not unused, f"the sharded model draws {unused} times more than the unsharded one")
        s.loss(wanted).backward()
        theirs = dict(flat(got))
        for name, tensor in flat(wanted):
            ledger.close(name, tensor, theirs[name])
    ledger.errors(gradient_errors(reference, model))


def _reproducible(s: Subject, ledger: Ledger) -> None:
    """One seed gives one run, and the user's own numbers are left alone."""
    torch.manual_seed(s.rank)
    model = s.shard(s.build(**DROPOUT))
    users = torch.get_rng_state()
    inputs = s.inputs(model)
    losses = []
    for _ in range(2):
        shardcore.manual_seed(model, 3)
        losses.append([s.loss(model(**inputs)).item() for _ in range(2)])
    ledger.true(losses[0] == losses[1], "two runs from one seed differ")
    ledger.true(losses[0][0] != losses[0][1], "two calls draw the same masks")
    ledger.true(equal_on_ranks(torch.tensor(losses)), "the loss differs between ranks")
    if s.tp > 1:
        ledger.true(torch.equal(users, torch.get_rng_state()), "the user's own random numbers were used")


def replicas(s: Subject, ledger: Ledger) -> None:
    """After four steps every replicated parameter is bit-equal on all ranks, however they were seeded (H19).

    In every second step the last rank asks for something else back, which changes nothing that is computed.
    """
    with ledger.check("replicas"):
        torch.manual_seed(50 * s.rank)
        wishes = list(_wishes(s, s.build())) if s.rank == s.tp - 1 else []
        model = s.shard(s.build(**(DROPOUT if s.case.supports.dropout else {})))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(_STEPS):
            s.loss(model(**s.inputs(model, step), **dict(wishes if step % 2 else ()))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mine = {
            name: part_of(p.detach())
            for name, p in model.named_parameters()
            if not isinstance(p, DTensor) or p.placements == (Replicate(),)
        }
        for other in s.gathered(mine):
            for name, tensor in mine.items():
                ledger.true(name in other and torch.equal(tensor, other[name]), f"{name} has drifted (H19)")
        if not mine:
            ledger.closed("no parameter is replicated")


def _wishes(s: Subject, model: Any) -> Iterator[tuple[str, bool]]:
    """Yield what a model takes of the arguments that say what it returns, with a value that the loss can be had of."""
    for name, value in (("return_dict", True), ("use_cache", False)):
        try:
            with torch.no_grad():
                model(**s.inputs(model), **{name: value})
        except TypeError:
            continue
        yield name, value


_GREEDY = {"max_new_tokens": 6, "do_sample": False}


def generation(s: Subject, ledger: Ledger) -> None:
    """The same tokens: greedy, with and without a cache, with beams, and sampled from one stream (H18, H40)."""
    with ledger.check("generation"):
        if not s.case.supports.generation:
            ledger.closed("generation")
            return
        torch.manual_seed(100 + s.rank)
        reference, model = (m.eval() for m in s.twins())
        prompt = s.prompt(reference)
        ways: dict[str, dict[str, Any]] = {
            "cache": {"use_cache": True},
            "no cache": {"use_cache": False},
            "static cache": {"use_cache": True, "cache_implementation": "static", "disable_compile": True},
            "beams": {"use_cache": True, "num_beams": 3},
        }
        for name, way in ways.items():
            with ledger.place(name):
                _same_tokens(ledger, reference, model, prompt, way)
        _cache(s, ledger, reference, model, prompt)
        _sampling(s, ledger, reference, model, prompt)


def _same_tokens(ledger: Ledger, reference: Any, model: Any, prompt: Any, way: dict[str, Any]) -> None:
    try:
        wanted = reference.generate(**prompt, **_GREEDY, **way)
    except Exception:  # whatever the unsharded model cannot do is not asked of the sharded one
        return
    got = model.generate(**prompt, **_GREEDY, **way)
    ledger.true(
        torch.equal(_tokens(wanted), _tokens(got)), f"{_tokens(got).tolist()}, wanted {_tokens(wanted).tolist()}"
    )


def _tokens(out: Any) -> Tensor:
    tokens: Tensor = out if isinstance(out, Tensor) else out.sequences
    return tokens


def _cache(s: Subject, ledger: Ledger, reference: Any, model: Any, prompt: Any) -> None:
    """A cache holds the heads of one rank only.

    Where the ranks do not divide the heads of keys, some have a head beside others, or repeat it for their queries. Of
    an attention that the case says is whole all ranks hold all.
    """
    way = {**_GREEDY, "use_cache": True, "return_dict_in_generate": True}
    wanted, got = (cached_heads(m.generate(**prompt, **way)) for m in (reference, model))
    ledger.true(bool(wanted), "the unsharded model returns no cache of keys: that caches are local is not seen (H18)")
    ledger.true(len(wanted) == len(got), f"the cache has {len(got)} layers, wanted {len(wanted)} (H18)")
    for index, (whole, *parts) in enumerate(zip(wanted, *s.gathered(got), strict=False)):
        if parts == [whole] * s.tp and _is_whole(s, index):
            continue
        fits = sum(parts) >= whole > min(parts, default=0) or whole == 1 if whole % s.tp else sum(parts) == whole
        ledger.true(fits, f"layer {index} of the cache holds {parts} heads of {whole} on the ranks (H18)")


def _is_whole(s: Subject, index: int) -> bool:
    """Tell whether the case names all linears of the attention of a block as whole."""
    model = s.build()
    inside = f"{s.blocks(model, s.plan(model))}.{index}."
    linears = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    names = [name for name in linears if name.startswith(inside) and re.search("att|mix|ssm|mamba", name)]
    return bool(names) and all(any(part in name for part in s.case.whole) for name in names)


def cached_heads(out: Any) -> list[int]:
    """Return the number of heads in every layer of a cache: of keys, or of the states of a mixer.

    Of both its caches, if it has one for another sequence.
    """
    cache = getattr(out, "past_key_values", None) or getattr(out, "cache", None)
    both = [getattr(cache, f"{kind}_attention_cache", None) for kind in ("self", "cross")]
    layers = [layer for one in (both if all(both) else [cache]) for layer in getattr(one, "layers", ())]
    found = [_held(layer) for layer in layers]
    return [held.shape[1] for held in found if isinstance(held, Tensor) and held.ndim >= 3]


def _held(layer: Any) -> Any:
    """Return the keys (rows, heads, ...) in one layer of a cache, or the first of its states."""
    if (keys := getattr(layer, "keys", None)) is not None:
        return keys
    states = getattr(layer, "recurrent_states", None)  # several, by their numbers, from transformers 5.24 on
    return states.get(0) if isinstance(states, dict) else states


def _sampling(s: Subject, ledger: Ledger, reference: Any, model: Any, prompt: Any) -> None:
    """Sampled tokens agree on all ranks, and are those of an unsharded model on the same stream."""
    sample = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "temperature": 2.0, "use_cache": True}
    shardcore.manual_seed(model, 11)
    states = shardcore.get_rng_state(model)
    got = _tokens(model.generate(**prompt, **sample))
    ledger.true(equal_on_ranks(got), "ranks sample different tokens (H40)")
    with torch.random.fork_rng():
        for device, state in states.items():
            (torch if device == "cpu" else torch.get_device_module(device)).set_rng_state(state)
        wanted = _tokens(reference.generate(**prompt, **sample))
    ledger.true(torch.equal(wanted, got), f"sampled {got.tolist()}, wanted {wanted.tolist()}")
