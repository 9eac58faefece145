"""BERT on transformers 4: attention counts heads and may know relative positions; a missing pooler keeps its place."""

from __future__ import annotations

from shard_bert import heads, policy
from shardcore.policy import ModulePolicy
from shardcore.styles import attribute, outputs, partial, per_rank, replicate


class _CountsHeads(policy.BertModelPolicy):
    """What every policy needs in addition."""

    def module_policy(self) -> ModulePolicy:
        """Return the rows of transformers 5, with those of attention modules (crossattention's too)."""
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
        return {**super().module_policy(), "BertModel": model, "BertSelfAttention": attention}


class BertModelPolicy(_CountsHeads):
    """See `shard_bert.policy`."""


class BertForPreTrainingPolicy(_CountsHeads, heads.BertForPreTrainingPolicy):
    """See `shard_bert.heads`."""


class BertForMaskedLMPolicy(_CountsHeads, heads.BertForMaskedLMPolicy):
    """See `shard_bert.heads`."""


class BertLMHeadModelPolicy(_CountsHeads, heads.BertLMHeadModelPolicy):
    """See `shard_bert.heads`."""


class BertForNextSentencePredictionPolicy(_CountsHeads, heads.BertForNextSentencePredictionPolicy):
    """See `shard_bert.heads`."""


class BertForSequenceClassificationPolicy(_CountsHeads, heads.BertForSequenceClassificationPolicy):
    """See `shard_bert.heads`."""


class BertForMultipleChoicePolicy(_CountsHeads, heads.BertForMultipleChoicePolicy):
    """See `shard_bert.heads`."""


class BertForTokenClassificationPolicy(_CountsHeads, heads.BertForTokenClassificationPolicy):
    """See `shard_bert.heads`."""


class BertForQuestionAnsweringPolicy(_CountsHeads, heads.BertForQuestionAnsweringPolicy):
    """See `shard_bert.heads`."""
