"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_FIRST = "transformers.models.deberta.modeling_deberta.Deberta"
_SECOND = "transformers.models.deberta_v2.modeling_deberta_v2.DebertaV2"
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve DeBERTa and DeBERTa-v2, and their heads."""
    first = {head: f"first:Deberta{head}Policy" for head in ("Model", *_HEADS)}
    second = {head: f"heads:DebertaV2{head}Policy" for head in (*_HEADS, "ForMultipleChoice")}
    second["Model"] = "policy:DebertaV2ModelPolicy"
    return [
        PolicySpec(target=f"{models}{head}", policy=f"shard_deberta.{policy}")
        for models, policies in ((_FIRST, first), (_SECOND, second))
        for head, policy in policies.items()
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and the ways in which positions are attended to."""
    return ["shard_deberta.cases:cases"]
