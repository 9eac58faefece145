"""A first draft of a policy: from what a small model computes, not from the names of its modules."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from shardcore.errors import ConfigError, ShardcoreError
from shardcore_scaffold.captured import add_captured
from shardcore_scaffold.draft import Draft, optional, plan_of, policy_of
from shardcore_scaffold.facts import Facts, common
from shardcore_scaffold.hints import otherwise
from shardcore_scaffold.mixtures import Mixture, mixtures_of
from shardcore_scaffold.outside import add_outside, leaf
from shardcore_scaffold.sequences import add_sequences
from shardcore_scaffold.stages import lists_of, stacks, stages_of
from shardcore_scaffold.structure import Region
from shardcore_scaffold.trial import misfit
from shardcore_scaffold.wording import Worded, worded
from shardcore_testing.islands import in_float64


@in_float64()
def guess(
    facts: Facts,
    *,
    delegated: bool = True,
    sequences: bool = True,
    captured: bool = True,
    tables: bool = True,
    without: Collection[tuple[str, str]] = (),
) -> Draft:
    """Return a first draft for the class of a model.

    What one rank cannot run, or what the way of its gradients shows to be wrong, is left whole, and the draft says so.

    Args:
        facts: what is known of the model: small, on the CPU in float64, with random parameters and without dropout.
        delegated: leave models inside to the packs that serve them, if what these say of them fits.
        sequences: say between which modules activations may be split along the sequence, if they may.
        captured: gather what the model can be asked for, as far as a rule is found that does.
        tables: split embeddings and heads over the vocabulary, if they can be.
        without: regions that are left whole, as `Draft.split` has them.

    Raises:
        ConfigError: not even a policy that splits nothing fits the model.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # the same draft in every process
        around = facts.delegating() if delegated else None
        draft = _around(around) if around is not None else None
        if draft is None:
            how = _How(frozenset(without), tables)
            draft = _with_sequences(facts, how) if sequences else _guess(facts, how)
            if captured:
                add_captured(draft, facts)
        draft.doubts += otherwise(facts.model, plan_of(facts.model, draft))
        return draft


@dataclass(frozen=True)
class _How:
    """What is left whole, and how what is split is written down."""

    without: frozenset[tuple[str, str]] = frozenset()  # regions, by class and row linear
    tables: bool = True  # split embeddings and heads over the vocabulary
    captured: int | Literal["whole"] | None = "whole"  # what is done with mixtures of experts
    entered: bool = False  # modules of heads are entered, also with one column linear, which could by itself


def _around(facts: Facts) -> Draft | None:
    """Return a draft that leaves models inside to their packs; None if it does not fit, or not all that it says."""
    try:
        draft = _with_sequences(facts, _How())
    except ConfigError:
        return None
    if not draft.sequence:
        with contextlib.suppress(ShardcoreError):
            plan_of(facts.model, draft, enable_sequence_parallelism=True)
            return None  # nothing would refuse what does not work
    return draft if add_captured(draft, facts) else None


_STACKED = 3  # dims of several matrices in one parameter

#: What is done with mixtures of experts: the place of the logits that a balancing loss needs, if it needs any; or they
#: are left whole.
_MIXED: tuple[int | Literal["whole"] | None, ...] = (None, 0, 1, 2, "whole")


def _guess(facts: Facts, how: _How) -> Draft:
    mixed = _MIXED if mixtures_of(facts) else _MIXED[-1:]
    problem = ""
    for tables in (True, False) if how.tables else (False,):
        found = _with_tables(facts, mixed, replace(how, tables=tables))
        if isinstance(found, Draft):
            found.doubts += [f"the vocabulary is left whole. Split, it fails: {problem[:300]}"] if problem else []
            return found
        problem = problem or found
    bare = _Drafting(facts, _whole(facts, replace(how, captured="whole", tables=False))).draft
    if last := _misfit(facts, bare):
        raise ConfigError(f"no policy for {type(facts.model).__name__} could be guessed: {last[:500]}")
    bare.doubts.append(f"neither blocks nor vocabulary are split: {problem[:300]}")
    return bare


def _whole(facts: Facts, how: _How) -> _How:
    """Return the same without any region."""
    return replace(how, without=how.without | _Drafting(facts, how).draft.regions.keys())


def _with_tables(facts: Facts, mixed: Sequence[int | Literal["whole"] | None], how: _How) -> Draft | str:
    """Return a draft that fits with all regions, or else with some; or why none with these tables does."""
    problem = ""
    for captured in mixed:
        draft = _Drafting(facts, replace(how, captured=captured)).draft
        fits = _misfit(facts, draft)
        if not fits:
            return draft
        problem = problem or fits
    for captured in mixed:
        none = _whole(facts, replace(how, captured=captured))
        less = _Drafting(facts, none).draft
        if not _misfit(facts, less):
            return _most(facts, less, none, how.without)
    return problem


def _most(facts: Facts, less: Draft, none: _How, without: frozenset[tuple[str, str]]) -> Draft:
    """Return a draft with each region that fits, one after another; ``less`` has none of them, as ``none`` says."""
    how = none
    for region in sorted(none.without - without, key=lambda key: (less.regions[key], key)):  # those of heads last
        fewer = replace(how, without=how.without - {region})
        more = _Drafting(facts, fewer).draft
        if problem := _misfit(facts, more):
            less.doubts.append(f"{region[0]}: what ends at {region[1]} is left whole. Split, it fails: {problem[:300]}")
        else:
            more.doubts += [doubt for doubt in less.doubts if "Split, it fails" in doubt]
            less, how = more, fewer
    return less


def _with_sequences(facts: Facts, how: _How) -> Draft:
    """Return a draft with rules for sequence parallelism, or without them and with the reason.

    A module with one column linear needs no entry of its own, but where tokens are split: before it, the module may
    count them.
    """
    plain = _guess(facts, how)
    why = ""
    for entered in (False, True):
        draft = _guess(facts, replace(how, entered=True)) if entered else copy.deepcopy(plain)
        if not plain.split <= draft.split:
            continue
        problem = add_sequences(draft, facts) or _misfit(facts, draft, enable_sequence_parallelism=True)
        if not problem:
            draft.sequence = True
            return draft
        why = why or problem
    if facts.parts and not _misfit(facts, plain, enable_sequence_parallelism=True):  # in the models inside alone
        plain.sequence = True
        return plain
    plain.doubts.append(f"no sequence parallelism: {why[:300]}")
    return plain


def _misfit(facts: Facts, draft: Draft, **fields: Any) -> str:
    return misfit(facts.fresh, policy_of(type(facts.model), draft), facts.call, **fields)


def _above(region: Region) -> str:
    return common([region.row, *(column.name for column in region.columns)])


class _Drafting:
    """The rules for what is known of a model."""

    def __init__(self, facts: Facts, how: _How) -> None:
        self.facts, self.how = facts, how
        self.modules = {path: module for path, module in facts.modules.items() if not facts.inside(path)}
        self.draft = Draft(packs=set(facts.parts.values()))
        if facts.query:
            kv = f', kv="{facts.kv}"' if facts.kv else ""
            self.draft.checks = f'(Heads("{facts.query}"{kv}),)'
        self.split: dict[str, int | None] = {}
        self.partial: set[str] = set()
        self.blocks: set[str] = set()
        self._add_blocks()
        self.draft.lists = lists_of(facts.model, self.blocks)
        cut = (*self.draft.lists, *facts.parts) or stacks(facts.model)
        self.draft.stages = stages_of(facts.model, cut)
        add_outside(self.draft, facts, self.blocks, split=self.split, partial=self.partial, tables=how.tables)

    def _add_blocks(self) -> None:
        """Add the rules of every class of blocks in which something can be split."""
        mixtures = () if self.how.captured == "whole" else mixtures_of(self.facts)
        inside = tuple(f"{mixture.path}." for mixture in mixtures)
        regions = [region for region in self.facts.regions if _above(region) and not region.row.startswith(inside)]
        mixed = {str(self.facts.owner(mixture.weights)): mixture for mixture in mixtures}
        blocks = {*mixed, *(self.facts.owner(f"{_above(region)}.x") for region in regions)}
        kinds, self.apart = set[type[nn.Module]](), {type(self.modules[block]) for block in blocks if block}
        while not self.apart <= kinds:
            kinds |= self.apart
            found: dict[str, list[Region]] = defaultdict(list)
            for region in regions:
                block = _above(region)
                while block and type(self.modules[block]) not in kinds:
                    block = block.rpartition(".")[0]
                found[block].append(region)
            found.pop("", None)
            places = {type(self.modules[block]): list[str]() for block in (*found, *mixed)}
            for path in sorted(path for path, module in self.modules.items() if type(module) in places):
                places[type(self.modules[path])].append(path)
            agreed = {cls: self._agreed(at, found) for cls, at in places.items()}
            self.blocks = {path for at in places.values() for path in at}
        for cls, at in places.items() if kinds else ():
            covered = self._add_regions(cls.__name__, at, agreed[cls])
            covered |= self._add_mixtures(cls.__name__, at, mixed)
            self._add_rest(cls.__name__, at, covered)

    def _agreed(self, places: list[str], regions: dict[str, list[Region]]) -> dict[str, list[Worded] | str]:
        """Return the words for each row linear in which blocks agree, or why there are none: they are taken apart."""
        found: dict[str, list[Worded] | str] = {}
        for row in dict.fromkeys(region.row[len(place) + 1 :] for place in places for region in regions[place]):
            there = [place for place in places if f"{place}.{row}" in self.modules]
            ends = [(place, r) for place in there for r in regions[place] if r.row == f"{place}.{row}"]
            for entered in (self.how.entered, None):  # None: each column linear enters by itself
                words = [worded(self.facts, place, region, entered=entered) for place, region in ends]
                said = [each for each in words if isinstance(each, Worded)]
                if len(said) == len(there) and (rules := self._rules_of_all(said)):
                    found[row] = [replace(each, rules=rules) for each in said]
                    break
            if row not in found:
                found[row] = next((each for each in words if isinstance(each, str)), "it differs from block to block")
                classes = {type(self.modules[_above(region)]) for _, region in ends}
                self.apart |= classes if len(classes) > 1 else set()
        return found

    def _rules_of_all(self, said: list[Worded]) -> list[tuple[str, str]]:
        """Return the rules that are right in all blocks; none if they differ.

        A number is set in all of them, a bias that only some have is named there, and an argument that only some get
        was made by another, which has a part of it.
        """
        kept = []
        for rule in dict.fromkeys(rule for words in said for rule in words.rules):
            without = [words for words in said if rule not in words.rules]
            names = {name for words in said for name in words.named(rule[1])}
            if without and rule[0] == "slice_arg":
                continue
            known = any(self._has(words.place, name) for words in without for name in names)
            if without and not rule[1].startswith("attribute(") and (known or not names):
                return []
            kept.append(rule)
        return kept

    def _add_regions(self, cls: str, places: list[str], agreed: dict[str, list[Worded] | str]) -> set[str]:
        """Add the regions that are the same in every block of a class; return what they cover."""
        covered: set[str] = set()
        for row, said in agreed.items():
            if isinstance(said, str):
                self.draft.doubts.append(f"{cls}: what ends at {row} is left whole: {said}")
                continue
            region = said[0].region
            self.draft.regions[cls, row] = region.width > 1
            if (cls, row) in self.how.without:
                continue
            self.draft.split.add((cls, row))
            for word, text in said[0].rules:
                names = {name for words in said for name in words.named(text)}
                always = len(said) == len(places) and all(self._has(place, n) for place in places for n in names)
                self.draft.add(cls, word, text if always else optional(text))
            for each in said:
                covered |= each.covered
                for split in each.split:  # by all names under which it is tied
                    self.split |= dict.fromkeys(self.facts.ties[self.facts.model.get_parameter(split.name)], split.dim)
                self.partial |= set(each.partial)
            if region.width > 1 and not self.facts.counts(region):
                self.draft.heads.add(region.units)
        return covered

    def _add_mixtures(self, cls: str, places: list[str], mixed: dict[str, Mixture]) -> set[str]:
        """Add the mixtures of experts of a class of blocks; return what they cover."""
        captured = None if self.how.captured == "whole" else self.how.captured
        covered: set[str] = set()
        for place, mixture in mixed.items():
            if place in places:
                for word, text in mixture.rules(place, captured):
                    self.draft.add(cls, word, text if all(p in mixed for p in places) else optional(text))
                inside = [path for path in self.modules if path.startswith(f"{mixture.path}.")]
                names = [name for name, _ in self.facts.model.named_parameters() if name.startswith(f"{mixture.path}.")]
                covered |= {name[len(place) + 1 :] for name in (*inside, *names)}
        return covered

    def _has(self, place: str, name: str) -> bool:
        owner, _, last = f"{place}.{name}".rpartition(".")
        return f"{place}.{name}" in self.modules or (owner in self.modules and last in self.modules[owner]._parameters)

    def _add_rest(self, cls: str, places: list[str], covered: set[str]) -> None:
        """Add a rule for everything in the blocks of a class that no region covers."""
        rest: dict[tuple[str, str], set[str]] = defaultdict(set)
        for place in places:
            for rule in self._rest(place, covered):
                rest[rule].add(place)
        for (word, text), where in rest.items():
            self.draft.add(cls, word, text if len(where) == len(places) else optional(text))

    def _rest(self, place: str, covered: set[str]) -> Iterator[tuple[str, str]]:
        inner = [block for block in self.blocks if block.startswith(f"{place}.")]
        for path, module in self.modules.items():
            if path != place and not path.startswith(f"{place}."):
                continue
            if any(path == block or path.startswith(f"{block}.") for block in inner):
                continue
            name = path[len(place) + 1 :]
            own = [short for short, p in module._parameters.items() if p is not None]
            loose = [short for short in own if f"{name}.{short}".lstrip(".") not in covered]
            if name in covered or not loose:
                continue
            if any(module._parameters[short].ndim == _STACKED for short in loose):
                self.draft.doubts.append(
                    f"{type(self.modules[place]).__name__}: {name} is left whole: several matrices in one"
                )
            if name and not module._modules and len(loose) == len(own):
                yield leaf(name, module)
            else:
                for short in loose:
                    bare = f"{name}.{short}".lstrip(".")
                    yield "replicate", f'replicate("{bare}"),'
