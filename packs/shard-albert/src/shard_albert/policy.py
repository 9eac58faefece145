"""How ALBERT is sharded: what every class of its modules needs, and what each head adds.

Its blocks are groups of layers, each of which runs several times: tokens stay whole between them.
"""

from __future__ import annotations

from typing import ClassVar

from shard_bert.heads import masked_lm_loss, pretraining_loss
from shardcore.integrations.transformers import PretrainedPolicy
from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import head, loss, norm, outputs, region, replicate, vocab


class AlbertModelPolicy(PretrainedPolicy):
    """The encoder without a head; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("embeddings", "encoder.embedding_hidden_mapping_in"),
        blocks="encoder.albert_layer_groups",
        last="pooler",
    )
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head.

        The module of the attention holds the residual connection: its linears enter by themselves.
        """
        qkv = ("attention.query", "attention.key", "attention.value")
        return {
            "AlbertModel": [replicate("pooler", optional=True), outputs(attentions="heads")],
            "AlbertEmbeddings": [
                vocab("word_embeddings"),
                replicate("position_embeddings", "token_type_embeddings"),
                norm("LayerNorm"),
            ],
            "AlbertTransformer": [replicate("embedding_hidden_mapping_in")],
            "AlbertLayer": [
                region(col=qkv, row="attention.dense", unit="head"),
                norm("attention.LayerNorm", "full_layer_layer_norm"),
                region(col="ffn", row="ffn_output"),
            ],
            **self.rules,
        }


_MODEL = AlbertModelPolicy.stages

#: The decoder is tied to the embedding, and its bias to a parameter beside it.
_VOCABULARY: ModulePolicy = {"AlbertMLMHead": [replicate("dense"), norm("LayerNorm"), head("decoder", bias="bias")]}


class AlbertForPreTrainingPolicy(AlbertModelPolicy):
    """Masked words and the order of sentences."""

    stages = _MODEL.under("albert", then=("predictions", "sop_classifier"))
    rules: ClassVar[ModulePolicy] = {
        **_VOCABULARY,
        "AlbertSOPHead": [replicate("classifier")],
        "AlbertForPreTraining": [
            loss(
                pretraining_loss,
                labels=("labels", "sentence_order_label"),
                logits=("prediction_logits", "sop_logits"),
            )
        ],
    }


class AlbertForMaskedLMPolicy(AlbertModelPolicy):
    """Masked words."""

    stages = _MODEL.under("albert", then="predictions")
    rules: ClassVar[ModulePolicy] = {**_VOCABULARY, "AlbertForMaskedLM": [loss(masked_lm_loss)]}


class _Classifies(AlbertModelPolicy):
    """A head with few labels."""

    stages = _MODEL.under("albert", then=("dropout", "classifier"))


class AlbertForSequenceClassificationPolicy(_Classifies):
    """A label for each sequence."""

    rules: ClassVar[ModulePolicy] = {"AlbertForSequenceClassification": [replicate("classifier")]}


class AlbertForTokenClassificationPolicy(_Classifies):
    """A label for each token."""

    rules: ClassVar[ModulePolicy] = {"AlbertForTokenClassification": [replicate("classifier")]}


class AlbertForMultipleChoicePolicy(_Classifies):
    """A score for each choice."""

    rules: ClassVar[ModulePolicy] = {"AlbertForMultipleChoice": [replicate("classifier")]}


class AlbertForQuestionAnsweringPolicy(AlbertModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = _MODEL.under("albert", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"AlbertForQuestionAnswering": [replicate("qa_outputs")]}
