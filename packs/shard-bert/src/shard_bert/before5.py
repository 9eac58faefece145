"""BERT on transformers 4: attention counts heads and may know relative positions; a missing pooler keeps its place."""

from __future__ import annotations

from shard_bert import heads, policy
from shardcore.policy import ModulePolicy
from shardcore.styles import attribute, outputs, partial, per_rank, replicate


def rules_of(family: str) -> ModulePolicy:
    """Return what the models of a family that is built like BERT need in addition, or otherwise."""
    attention = [
        attribute("num_attention_heads", per_rank),
        attribute("all_head_size", per_rank),
        partial("distance_embedding", optional=True),
    ]
    model = [
        replicate("pooler", optional=True),
        outputs(attentions="heads", cross_attentions="heads", hidden_states="sequence", places="pooler_output"),
        policy.TOKENS,
    ]
    return {f"{family}Model": model, f"{family}SelfAttention": attention}


class _CountsHeads(policy.BertModelPolicy):
    """What every policy needs in addition."""

    def module_policy(self) -> ModulePolicy:
        """Return the rules of transformers 5, with those of attention modules (crossattention's too)."""
        return {**super().module_policy(), **rules_of(self.family)}


class BertModelPolicy(_CountsHeads):
    """`shard_bert.policy.BertModelPolicy` for transformers 4."""


class BertForPreTrainingPolicy(_CountsHeads, heads.BertForPreTrainingPolicy):
    """`shard_bert.heads.BertForPreTrainingPolicy` for transformers 4."""


class BertForMaskedLMPolicy(_CountsHeads, heads.BertForMaskedLMPolicy):
    """`shard_bert.heads.BertForMaskedLMPolicy` for transformers 4."""


class BertLMHeadModelPolicy(_CountsHeads, heads.BertLMHeadModelPolicy):
    """`shard_bert.heads.BertLMHeadModelPolicy` for transformers 4."""


class BertForNextSentencePredictionPolicy(_CountsHeads, heads.BertForNextSentencePredictionPolicy):
    """`shard_bert.heads.BertForNextSentencePredictionPolicy` for transformers 4."""


class BertForSequenceClassificationPolicy(_CountsHeads, heads.BertForSequenceClassificationPolicy):
    """`shard_bert.heads.BertForSequenceClassificationPolicy` for transformers 4."""


class BertForMultipleChoicePolicy(_CountsHeads, heads.BertForMultipleChoicePolicy):
    """`shard_bert.heads.BertForMultipleChoicePolicy` for transformers 4."""


class BertForTokenClassificationPolicy(_CountsHeads, heads.BertForTokenClassificationPolicy):
    """`shard_bert.heads.BertForTokenClassificationPolicy` for transformers 4."""


class BertForQuestionAnsweringPolicy(_CountsHeads, heads.BertForQuestionAnsweringPolicy):
    """`shard_bert.heads.BertForQuestionAnsweringPolicy` for transformers 4."""
