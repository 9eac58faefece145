"""Which number is which draw: pipelines, the Booster, mixtures of experts, adapters and parts, beside `draws`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draws import FAMILIES, MODELS, Dice, Draw, draw_plain

__all__ = ["FIRST", "KINDS", "MIXTURES", "draw", "numbers"]

#: The kind of a draw is its number divided by `FIRST`.
KINDS = ("plain", "pipeline", "booster", "experts", "adapters", "parts", "cases")
FIRST = 1_000_000

MIXTURES: Mapping[str, tuple[str, ...]] = {"mixtral": ("MixtralForCausalLM",), "qwen3_moe": ("Qwen3MoeForCausalLM",)}

#: Classes that have a loss, or an output that a criterion takes.
_TRAINED = {family: tuple(cls for cls in classes if not cls.endswith("Model")) for family, classes in FAMILIES.items()}
_TRAINED["timm"] = ("VisionTransformer",)
#: Classes whose labels are those of tokens, at their own places or of one later.
_TOKENS = ("ForTokenClassification", "ForMaskedLM", "ForCausalLM", "BertLMHeadModel", "ForConditionalGeneration")
#: Losses that are no mean over one kind of items: whether they can be put together depends on the batch.
_MIXED = ("BertForPreTraining", "ViTForMaskedImageModeling")
_LATER = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM")

_SPLIT = ("interleaved_zero_bubble", "zbv", "dualpipev")
_LOOPED = ("interleaved", "looped_bfs", *_SPLIT)
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Class -> what people shard alone, and whether a module outside holds a parameter of it if weights are tied.
_PARTS = {
    "LlamaForCausalLM": ("model", True),
    "LlamaForSequenceClassification": ("model", False),
    "BertForMaskedLM": ("bert", True),
    "BertForSequenceClassification": ("bert", False),
    "ViTForImageClassification": ("vit", False),
    "LlavaForConditionalGeneration": ("model.language_model", True),
    "Between": ("body", False),
}


def draw(number: int) -> Draw:
    """Return the draw of this number: the same in every process, whatever is installed."""
    kind = KINDS[number // FIRST]
    if kind == "plain":
        one = draw_plain(number)
    else:
        found = _DRAWN[kind](Dice(number))
        one = Draw(number=number, kind=kind, **found)
    whole = one.fields.get("pipeline_schedule") not in _SPLIT
    if whole and one.fields.get("enable_sequence_parallelism") and Dice(f"overlap {number}").often(0.4):
        one = replace(one, fields={**one.fields, "enable_sequence_overlap": True})
    dice = Dice(f"odd {number}")
    if not (odd := _odd(dice, one)):
        return one
    return replace(one, odd=odd, fields={**one.fields, "check_inputs_every": 0} if dice.often(0.5) else one.fields)


def numbers(first: int, draws: int, kinds: Sequence[str] = KINDS) -> Iterator[int]:
    """Yield the numbers of draws, in turn of each kind."""
    for at in range(draws):
        yield FIRST * KINDS.index(kinds[at % len(kinds)]) + first + at // len(kinds)


def _odd(dice: Dice, one: Draw) -> dict[str, Any]:
    """Return what one rank alone passes: nothing in most draws, nor to steps of pipelines, whose ranks compare it."""
    if one.family in ("timm", "cases") or one.pp > 1 or one.call in ("generate", "part") or not dice.often(0.3):
        return {}
    named: dict[str, Any] = {"return_dict": True}
    if one.kind != "plain" and one.family in ("llama", *MIXTURES):
        named = dice.of(named, {"use_cache": True}, {"use_cache": None})
    return {"rank": dice.of(*range(one.ranks)), "arguments": named}


def _pipeline(dice: Dice) -> dict[str, Any]:
    tp, dp = dice.of((1, 1), (1, 1), (1, 1), (2, 1), (1, 2))
    found = _trained(dice, tp, dp, 2)
    found["fields"] |= _division(dice, found)
    if found["cls"] != "VisionTransformer" and dice.often(0.2):
        found["checkpointing"] = dice.of("non-reentrant", "reentrant")
        if found["checkpointing"] == "reentrant" and found["fields"]["pipeline_schedule"] in _SPLIT:
            found["must"] = found["must"] or "a reentrant checkpoint"
        # Embeddings that are given need no gradient.
        found["may"] += ("reentrant checkpoints give none",)
    return found


def _booster(dice: Dice) -> dict[str, Any]:
    tp, dp, pp = dice.of((2, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2))
    found = _trained(dice, tp, dp, pp)
    how = found["how"]
    how["zero_stage"] = dice.of(0, 1, 3) if dp > 1 and pp > 1 else dice.of(0, 1, 2, 3) if dp > 1 else 0
    how["loop"] = dice.of("plain", "batches") if pp == 1 else "batches"
    if how["loop"] == "batches":
        found["fields"] |= _division(dice, found)
        looped = found["fields"].get("pipeline_schedule", "1f1b")
        if how["zero_stage"] == 3 and looped in _SPLIT:
            how["zero_stage"] = 1
    else:
        found["may"] = ()
        # FSDP2 frees what it gathered after each backward, and a closure that comes in a step is that of its optimizer.
        how["closure"] = dice.often(0.3)
        if how["closure"] and (how["max_norm"] or found["fields"].get("partial_gradients") == "deferred"):
            found["must"] = found["must"] or "a closure"
    return found


def _experts(dice: Dice) -> dict[str, Any]:
    tp, dp, ep = dice.of((2, 1, 1), (3, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 1))
    family = dice.of(*MIXTURES)
    grouped = dice.often(0.5)
    model = _model(dice, "llama", "", tp)
    heads, experts = model["num_attention_heads"], dice.of(2, 3, 5)
    inner = dice.of(12, 20, 44) if grouped else dice.of(7, 16, 37)  # rows of all experts are of whole 16 bytes
    for name in ("mlp_bias", "attention_bias"):
        del model[name]
    model |= {"hidden_size": heads * dice.of(4, 8), "intermediate_size": inner, "num_experts_per_tok": dice.of(1, 2)}
    if family == "mixtral":
        model |= {"num_local_experts": experts}
    else:
        model |= {"num_experts": experts, "moe_intermediate_size": inner, "head_dim": dice.of(4, 6)}
        model |= {"norm_topk_prob": dice.often(0.5)}
    model["experts_implementation"] = "grouped_mm" if grouped else "eager"
    cls = MIXTURES[family][0]
    mesh = {"tensor_parallel_size": tp}
    if dp > 1:
        mesh["dp_shard_size"] = dp
    if ep > 1:
        mesh["expert_parallel_size"] = ep
    return {
        "family": family,
        "cls": cls,
        "mesh": mesh,
        "ranks": tp * dp,
        "fields": _fields(dice),
        "model": model,
        "batch": _text(dice, cls, embeds=False),
        "call": "training",
        "dtype": "float32" if grouped else "float64",
        "how": {**_steps(dice), "balanced": dice.often(0.4), **({"optimizer": "sgd"} if grouped else {})},
    }


def _adapters(dice: Dice) -> dict[str, Any]:
    tp, shards, copies = dice.of((2, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 2, 1), (1, 1, 2))
    cls = dice.of("LlamaForCausalLM", "LlamaForCausalLM", "LlamaForSequenceClassification", "BertForMaskedLM")
    family = "llama" if cls.startswith("Llama") else "bert"
    model = _model(dice, family, cls, tp) | {"tie_word_embeddings": False}
    lora: dict[str, Any] = {"r": dice.of(1, 2, 3), "lora_alpha": 8, "use_rslora": dice.often(0.2)}
    linears = dice.of(_LINEARS, ["q_proj", "v_proj"], ["o_proj", "down_proj"], [*_LINEARS, "embed_tokens"])
    lora["target_modules"] = "all-linear" if family == "bert" or dice.often(0.2) else linears
    lora["use_dora"] = "embed_tokens" not in lora["target_modules"] and dice.often(0.2)
    lora["bias"] = dice.of("none", "none", "lora_only")
    if cls != "BertForMaskedLM" and dice.often(0.3):
        lora["modules_to_save"] = ["lm_head" if cls == "LlamaForCausalLM" else "score"]
    mesh = {"tensor_parallel_size": tp}
    if shards > 1:
        mesh["dp_shard_size"] = shards
    if copies > 1:
        mesh["dp_replicate_size"] = copies
    fields = _fields(dice)
    attached = dice.of("before", "after")
    if shards * copies > 1 and ("modules_to_save" in lora or fields.get("partial_gradients") == "deferred"):
        attached = "before"
    return {
        "family": family,
        "cls": cls,
        "mesh": mesh,
        "ranks": tp * shards * copies,
        "fields": fields,
        "model": model,
        "batch": _text(dice, cls, embeds=False),
        "call": "training",
        "how": {**_steps(dice), "lora": lora, "attached": attached},
    }


def _parts(dice: Dice) -> dict[str, Any]:
    tp = dice.of(2, 2, 2, 3)
    cls = dice.of(*_PARTS)
    part, tied = _PARTS[cls]
    family = "bert" if cls.startswith("Bert") else "vit" if cls.startswith("ViT") else "llama"
    model = _model(dice, family, cls, tp)
    images = cls.startswith("Llava")
    batch = {"rows": dice.of(1, 2, 3)} if family == "vit" else _text(dice, cls, embeds=not images and dice.often(0.2))
    if images:
        batch |= {"length": dice.of(6, 9), "mask": dice.of("none", "left")}
    return {
        "family": family,
        "cls": cls,
        "mesh": {"tensor_parallel_size": tp},
        "ranks": tp,
        "fields": _fields(dice),
        "model": model,
        "batch": batch,
        "call": "training",
        "frozen": dice.of(0.3, 0.7) if dice.often(0.2) else 0.0,
        "how": {**_steps(dice), "part": part},
        "must": "weights are tied across the border" if tied and model["tie_word_embeddings"] else "",
    }


def _case(dice: Dice) -> dict[str, Any]:
    from cases import draw_case  # which asks what is installed

    return draw_case(dice)


_DRAWN = {
    "pipeline": _pipeline,
    "booster": _booster,
    "experts": _experts,
    "adapters": _adapters,
    "parts": _parts,
    "cases": _case,
}


def _trained(dice: Dice, tp: int, dp: int, pp: int) -> dict[str, Any]:
    """Return the draw of a model with a loss, over these axes."""
    family = dice.of(*_TRAINED)
    cls = dice.of(*_TRAINED[family])
    model = _model(dice, family, cls, tp)
    if family == "whisper":
        model["use_weighted_layer_sum"] = False  # a loss of the states of all blocks
    how = _steps(dice)
    how["criterion"] = "rows" if family == "timm" else ""
    batch: dict[str, Any] = {"rows": dice.of(2, 3, 4, 5, 7)}
    if family in ("llama", "bert", "whisper"):
        batch = _text(dice, cls, embeds=dice.often(0.2)) | batch
        # The logits of a question are two, and those of these classes have no labels of tokens beside them.
        if cls.endswith(("ForTokenClassification", "ForMaskedLM")) and dice.often(0.3):
            how["criterion"] = "smoothing"
    fields = _fields(dice)
    if pp > 1:
        fields.pop("sequence_keep_gathered", None)
    if not how["criterion"] and cls in ("LlamaForCausalLM", "BertForMaskedLM") and dice.often(0.4):
        fields["parallel_output"] = True
    mesh = {"tensor_parallel_size": tp}
    if pp > 1:
        mesh["pipeline_parallel_size"] = pp
    if dp > 1:
        mesh["dp_shard_size"] = dp
    return {
        "family": family,
        "cls": cls,
        "mesh": mesh,
        "ranks": tp * dp * pp,
        "fields": fields,
        "model": model,
        "batch": batch,
        "call": "training",
        "frozen": dice.of(0.3, 0.7) if dice.often(0.2) else 0.0,
        "how": how,
        "must": "",
        "may": ("cannot be put together",) if cls in _MIXED else (),
    }


def _model(dice: Dice, family: str, cls: str, tp: int) -> dict[str, Any]:
    """Return settings of a model, whose KV heads mostly fit: whether they do is tried by the first kind."""
    model = MODELS[family](dice, cls, tp)
    if "num_key_value_heads" in model and dice.often(0.9):
        heads = model["num_attention_heads"]
        kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
        model["num_key_value_heads"] = dice.of(*kv)
        model["heads_of"] = ((heads, model["num_key_value_heads"]),)
    return model


def _division(dice: Dice, found: dict[str, Any]) -> dict[str, Any]:
    """Return how batches are divided, and the schedule of a pipeline; the model gets as many blocks as it needs."""
    fields: dict[str, Any] = dice.of({"num_microbatches": dice.of(1, 2, 3, 4)}, {"microbatch_size": dice.of(1, 2)})
    if "pipeline_parallel_size" not in found["mesh"]:
        return fields
    fields["pipeline_schedule"] = dice.of("1f1b", "1f1b", "gpipe", *_LOOPED)
    stages = 4 if fields["pipeline_schedule"] in _LOOPED else 2
    if stages == 4:
        fields["num_model_chunks"] = 2
        # Of as many as somebody asked for; where nobody did, fillers are run.
        found["may"] += ("micro-batches through 4 stages",) * (fields.get("num_microbatches", 1) > 1)
    model, fewer = found["model"], dice.often(0.05)
    names = ("num_hidden_layers", "depth", "encoder_layers", "decoder_layers")
    halves = 2 if found["cls"] == "WhisperForConditionalGeneration" else 1
    for name in names:
        if name in model:
            model[name] = max(1, stages // halves - 1 if fewer else stages // halves + dice.of(0, 0, 1))
    if fewer and stages > halves:  # each half has a block at least
        found["must"] = found["must"] or "fewer blocks than stages"
    return fields


def _steps(dice: Dice) -> dict[str, Any]:
    return {
        "steps": dice.of(1, 2, 2),
        "accumulate": dice.of(1, 1, 2),
        "max_norm": dice.of(0.0, 0.1, 0.1),
        "optimizer": dice.of("adamw", "adamw", "sgd"),
    }


def _fields(dice: Dice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if dice.often(0.4):
        fields["enable_sequence_parallelism"] = True
        if dice.often(0.4):
            fields["sequence_keep_gathered"] = False
    if dice.often(0.4):
        fields["partial_gradients"] = dice.of("in_backward", "deferred")
    return fields


def _text(dice: Dice, cls: str, *, embeds: bool) -> dict[str, Any]:
    """Return batches of which some labels count, in rows that have other numbers of them."""
    return {
        "rows": dice.of(1, 2, 3),
        "length": dice.of(2, 3, 5, 8),
        "labels": dice.of("uneven", "uneven", "all"),
        "mask": dice.of("none", "right", "left", "holes"),
        "embeds": embeds,
        "items": cls in _LATER and dice.often(0.3),
    }
