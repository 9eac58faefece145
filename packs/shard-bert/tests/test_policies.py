"""What the policy says on which release, and that each row of it is needed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import transformers
from bert_cases import CROSS, OLD, build, policy

import shard_bert
import shardcore


def _plan(rules, model, tp=2, **fields):
    return shardcore.compile_plan(rules, model, shardcore.ShardConfig(tensor_parallel_size=tp, **fields))


def test_policies_differ_in_what_attention_reads():
    model = build("BertForMaskedLM")
    plan = _plan(policy(model), model)
    attributes = [step.name for step in plan.steps if type(step).__name__ == "SetAttribute"]
    assert sorted(attributes) == (["all_head_size"] * 2 + ["num_attention_heads"] * 2 if OLD else [])


def test_policies_are_short_and_override_no_forward():
    for module in ("policy", "heads", "before5"):
        source = Path(shard_bert.__file__).with_name(f"{module}.py").read_text()
        assert len(source.splitlines()) < 100
        assert "def forward" not in source


@pytest.mark.parametrize(("name", "options"), [("BertLMHeadModel", CROSS), ("BertForPreTraining", {})])
def test_every_row_is_needed(name, options):
    # Dropping a row is an error, but for those of outputs and arguments: of the latter the first training call tells.
    model = build(name, **options)
    base = policy(model)
    free = ("outputs(", "loss(", "attribute(", "enter_arg(")
    whole = base()
    whole.set_model(model)
    rows = [(key, i, row) for key, found in whole.module_policy().items() for i, row in enumerate(found)]
    needed = 0
    for key, index, row in rows:
        if row.text.startswith(free):
            continue

        class Without(base):
            def module_policy(self, key=key, index=index):
                found = dict(super().module_policy())
                found[key] = [r for i, r in enumerate(found[key]) if i != index]
                return found

        unused = row.optional and not _matches(base, model, row)
        if unused:
            continue
        needed += 1
        fields = {"enable_sequence_parallelism": True} if "sequence" in row.text else {}
        with pytest.raises(shardcore.PlanError, match=r"covered by no rule|between which modules tokens may be"):
            _plan(Without, model, **fields)
    assert needed >= 9


def _matches(base, model, row) -> bool:
    """Tell whether an optional row has something to do in this model."""
    strict = copy.copy(row)
    object.__setattr__(strict, "optional", False)

    class Strict(base):
        def module_policy(self):
            return {k: [strict if r is row or r == row else r for r in v] for k, v in super().module_policy().items()}

    try:
        _plan(Strict, model)
    except shardcore.PlanError:
        return False
    return True


def test_a_class_of_ones_own_has_the_loss_of_its_base():
    class Mine(transformers.BertForMaskedLM):
        pass

    base = policy(build("BertForMaskedLM"))()
    base.set_model(Mine(transformers.BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=20)))
    assert any(rule.text.startswith("loss(") for rules in base.module_policy().values() for rule in rules)


def test_heads_that_do_not_divide():
    model = build("BertForMaskedLM", num_attention_heads=3)
    with pytest.raises(shardcore.PlanError, match="3 query heads"):
        _plan(policy(model), model)
