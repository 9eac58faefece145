"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_GPT2 = "transformers.models.gpt2.modeling_gpt2"
_MODELS = (
    "GPT2Model",
    "GPT2LMHeadModel",
    "GPT2ForSequenceClassification",
    "GPT2ForTokenClassification",
    "GPT2ForQuestionAnswering",
)
_BIGCODE = "transformers.models.gpt_bigcode.modeling_gpt_bigcode"


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve GPT-2, GPTBigCode, and their heads."""
    double = "GPT2DoubleHeadsModel"
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    return [
        PolicySpec(target=f"{_GPT2}.{double}", policy="shard_gpt2.policy:GPT2DoubleHeadsPolicy"),
        *(PolicySpec(target=f"{_GPT2}.{name}", policy="shard_gpt2.policy:GPT2Policy") for name in _MODELS),
        *(
            PolicySpec(target=f"{_BIGCODE}.GPTBigCode{head}", policy="shard_gpt2.bigcode:GPTBigCodePolicy")
            for head in heads
        ),
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, and a decoder that attends to an encoder's states."""
    return ["shard_gpt2.cases:cases"]
