"""How Mistral and Mixtral are sharded: the decoder that they share, their MLPs or experts, and what each head adds."""

from __future__ import annotations

from typing import Any, ClassVar

from shardcore.integrations.transformers import PretrainedPolicy
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    experts,
    head,
    local_groups,
    norm,
    outputs,
    refuse,
    region,
    replicate,
    sequence,
    vocab,
)


class MistralModelPolicy(PretrainedPolicy):
    """The decoder without a head."""

    checks = (Heads("num_attention_heads", kv="num_key_value_heads"),)
    stages = Stages(first="embed_tokens", blocks="layers", last="norm", everywhere="rotary_emb")
    family: ClassVar[str] = "Mistral"
    #: What a head adds to its model.
    of_head: ClassVar[dict[str, list[Rule]]] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            f"{self.family}Model": [
                vocab("embed_tokens"),
                norm("norm", rms="variance_epsilon"),
                sequence(scatter="layers[0]", gather="norm"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            f"{self.family}DecoderLayer": [
                norm("input_layernorm", "post_attention_layernorm", rms="variance_epsilon"),
                region(
                    enter="self_attn",
                    col="self_attn.q_proj",
                    kv=("self_attn.k_proj", "self_attn.v_proj"),
                    row="self_attn.o_proj",
                    unit="head",
                ),
                attribute("self_attn.num_key_value_groups", local_groups),
            ],
            **self.feed_forward(),
            **{f"{self.family}{kind}": rules for kind, rules in self.of_head.items()},
        }

    def feed_forward(self) -> ModulePolicy:
        """Return the rules of what follows the attention."""
        return {"MistralMLP": [region(enter="", col=("gate_proj", "up_proj"), row="down_proj")]}


class MixtralModelPolicy(MistralModelPolicy):
    """The decoder with experts, without a head."""

    family = "Mixtral"

    def feed_forward(self) -> ModulePolicy:
        """Return the rules of the experts: one module since transformers 5, a list of them before."""
        jitter = "router_jitter_noise changes what entered the experts in place, which autograd refuses"
        return {
            "MixtralSparseMoeBlock": [
                experts(captured=0, col=("w1", "w3"), row="w2"),
                refuse(_jitters, jitter, todo="set router_jitter_noise=0"),
            ]
        }


def _jitters(block: Any) -> bool:
    return bool(block.jitter_noise > 0)


def _with_head(base: type[MistralModelPolicy], kind: str, rule: Rule, *then: str) -> type[MistralModelPolicy]:
    """Return the policy of ``base`` with a head: its rule, and the modules that run after the decoder."""
    stages = base.stages.under("model", then=then)
    name = f"{base.family}{kind}Policy"
    made = {"__doc__": f"{base.family}{kind}.", "__module__": __name__, "stages": stages, "of_head": {kind: [rule]}}
    return type(name, (base,), made)


MistralForCausalLMPolicy = _with_head(MistralModelPolicy, "ForCausalLM", head("lm_head"), "lm_head")
MixtralForCausalLMPolicy = _with_head(MixtralModelPolicy, "ForCausalLM", head("lm_head"), "lm_head")

_SCORE, _OF_TOKENS, _SPANS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
MistralForSequenceClassificationPolicy = _with_head(MistralModelPolicy, _SCORE, replicate("score"), "score")
MixtralForSequenceClassificationPolicy = _with_head(MixtralModelPolicy, _SCORE, replicate("score"), "score")
MistralForTokenClassificationPolicy = _with_head(MistralModelPolicy, _OF_TOKENS, replicate("score"), "dropout", "score")
MixtralForTokenClassificationPolicy = _with_head(MixtralModelPolicy, _OF_TOKENS, replicate("score"), "dropout", "score")
MistralForQuestionAnsweringPolicy = _with_head(MistralModelPolicy, _SPANS, replicate("qa_outputs"), "qa_outputs")
MixtralForQuestionAnsweringPolicy = _with_head(MixtralModelPolicy, _SPANS, replicate("qa_outputs"), "qa_outputs")
