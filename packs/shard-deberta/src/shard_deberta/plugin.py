"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_FIRST = "transformers.models.deberta.modeling_deberta.Deberta"
_SECOND = "transformers.models.deberta_v2.modeling_deberta_v2.DebertaV2"
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DeBERTa and DeBERTa-v2, and their heads."""
    return [
        *(PolicySpec(target=f"{_FIRST}{head}", policy="shard_deberta.first:DebertaPolicy") for head in _HEADS),
        *(
            PolicySpec(target=f"{_SECOND}{head}", policy="shard_deberta.policy:DebertaV2Policy")
            for head in (*_HEADS, "ForMultipleChoice")
        ),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which positions are attended to."""
    return ["shard_deberta.cases:cases"]
