"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

#: What the names of classes begin with, by the module of transformers.
_FAMILIES = {
    "aya_vision": "AyaVision",
    "gemma3": "Gemma3",
    "idefics3": "Idefics3",
    "internvl": "InternVL",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
    "mistral3": "Mistral3",
    "paligemma": "PaliGemma",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_vl": "Qwen2VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "smolvlm": "SmolVLM",
}
#: What is inside of them and no other pack's, and the policy of each.
_PARTS = {
    "gemma4.modeling_gemma4.Gemma4AudioModel": "shard_vlm.gemma_towers:Gemma4AudioModelPolicy",
    "gemma4.modeling_gemma4.Gemma4VisionModel": "shard_vlm.gemma_towers:Gemma4VisionModelPolicy",
    "idefics3.modeling_idefics3.Idefics3VisionTransformer": "shard_vlm.towers:IdeficsTowerPolicy",
    "internvl.modeling_internvl.InternVLVisionModel": "shard_vlm.towers:InternVLVisionModelPolicy",
    "pixtral.modeling_pixtral.PixtralVisionModel": "shard_vlm.towers:PixtralVisionModelPolicy",
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel": "shard_llama.policy:LlamaPolicy",
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": "shard_vlm.qwen:Qwen25VLTowerPolicy",
    "qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel": "shard_llama.policy:LlamaPolicy",
    "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": "shard_vlm.qwen:Qwen2VLTowerPolicy",
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel": "shard_vlm.qwen:Qwen3VLTextPolicy",
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": "shard_vlm.qwen:Qwen3VLTowerPolicy",
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextModel": "shard_vlm.qwen:Qwen3VLMoeTextPolicy",
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel": "shard_vlm.qwen:Qwen3VLTowerPolicy",
    "smolvlm.modeling_smolvlm.SmolVLMVisionTransformer": "shard_vlm.towers:IdeficsTowerPolicy",
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, with its head and without, and what is inside of them."""
    joined = {
        f"{module}.modeling_{module}.{family}{kind}": "shard_vlm.policy:VisionLanguagePolicy"
        for module, family in _FAMILIES.items()
        for kind in ("Model", "ForConditionalGeneration")
    }
    joined["gemma3.modeling_gemma3.Gemma3ForSequenceClassification"] = "shard_vlm.policy:VisionLanguagePolicy"
    for kind in ("Model", "ForConditionalGeneration"):
        joined[f"gemma4.modeling_gemma4.Gemma4{kind}"] = "shard_vlm.gemma:Gemma4MultimodalPolicy"
    return [
        PolicySpec(target=f"transformers.models.{target}", policy=policy)
        for target, policy in {**joined, **_PARTS}.items()
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with tower and language model as they are combined in what people run."""
    return ["shard_vlm.cases:cases"]
