"""What this pack offers to shardcore: strings only, so that discovering it imports neither torch nor transformers."""

from __future__ import annotations

from shardcore.hooks import PolicySpec, hookimpl

_JOINED = "shard_vlm.policy:VisionLanguagePolicy"
#: What the names of classes begin with, by the module of transformers.
_FAMILIES = {
    "audioflamingo3": "AudioFlamingo3",
    "aya_vision": "AyaVision",
    "gemma3": "Gemma3",
    "glmasr": "GlmAsr",
    "idefics3": "Idefics3",
    "internvl": "InternVL",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "llava_onevision": "LlavaOnevision",
    "mistral3": "Mistral3",
    "musicflamingo": "MusicFlamingo",
    "paligemma": "PaliGemma",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_vl": "Qwen2VL",
    "qwen2_audio": "Qwen2Audio",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "smolvlm": "SmolVLM",
    "voxtral": "Voxtral",
}
#: What is inside of them and no other pack's, and the policy of each.
_PARTS = {
    "audioflamingo3.modeling_audioflamingo3.AudioFlamingo3Encoder": "shard_vlm.sounds:WhisperTowerPolicy",
    "gemma4.modeling_gemma4.Gemma4AudioModel": "shard_vlm.gemma_towers:Gemma4AudioModelPolicy",
    "gemma4.modeling_gemma4.Gemma4VisionModel": "shard_vlm.gemma_towers:Gemma4VisionModelPolicy",
    "glmasr.modeling_glmasr.GlmAsrEncoder": "shard_vlm.sounds:GlmAsrTowerPolicy",
    "idefics3.modeling_idefics3.Idefics3VisionTransformer": "shard_vlm.towers:IdeficsTowerPolicy",
    "internvl.modeling_internvl.InternVLVisionModel": "shard_vlm.towers:InternVLVisionModelPolicy",
    "phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioModel": "shard_vlm.phi4:Phi4SoundsPolicy",
    "phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalForCausalLM": "shard_vlm.phi4:Phi4MultimodalPolicy",
    "phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalModel": "shard_vlm.phi4:Phi4MultimodalPolicy",
    "phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalVisionModel": "shard_vlm.phi4:Phi4VisionPolicy",
    "pixtral.modeling_pixtral.PixtralVisionModel": "shard_vlm.towers:PixtralVisionModelPolicy",
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel": "shard_llama.policy:LlamaPolicy",
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": "shard_vlm.qwen:Qwen25VLTowerPolicy",
    "qwen2_audio.modeling_qwen2_audio.Qwen2AudioEncoder": "shard_vlm.sounds:WhisperTowerPolicy",
    "qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel": "shard_llama.policy:LlamaPolicy",
    "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": "shard_vlm.qwen:Qwen2VLTowerPolicy",
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel": "shard_vlm.qwen:Qwen3VLTextPolicy",
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": "shard_vlm.qwen:Qwen3VLTowerPolicy",
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextModel": "shard_vlm.qwen:Qwen3VLMoeTextPolicy",
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel": "shard_vlm.qwen:Qwen3VLTowerPolicy",
    "smolvlm.modeling_smolvlm.SmolVLMVisionTransformer": "shard_vlm.towers:IdeficsTowerPolicy",
    "voxtral.modeling_voxtral.VoxtralEncoder": "shard_vlm.sounds:WhisperTowerPolicy",
}
#: Of thinkers that hear and see, and of what is inside of them, whose models without a head came late.
_THINKERS = {
    "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniAudioEncoder": "shard_vlm.omni:Qwen25OmniSoundsPolicy",
    "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniThinkerForConditionalGeneration": _JOINED,
    "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniThinkerModel": _JOINED,
    "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniThinkerTextModel": "shard_llama.policy:LlamaPolicy",
    "qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniVisionEncoder": "shard_vlm.omni:Qwen25OmniTowerPolicy",
    "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeAudioEncoder": "shard_vlm.omni:Qwen3OmniSoundsPolicy",
    "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration": _JOINED,
    "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerModel": _JOINED,
    "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel": "shard_vlm.qwen:Qwen3VLMoeTextPolicy",
    "qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeVisionEncoder": "shard_vlm.omni:Qwen3OmniTowerPolicy",
}


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    """Serve each family, with its head and without, and what is inside of them."""
    joined = {
        f"{module}.modeling_{module}.{family}{kind}": _JOINED
        for module, family in _FAMILIES.items()
        for kind in ("Model", "ForConditionalGeneration")
    }
    joined["gemma3.modeling_gemma3.Gemma3ForSequenceClassification"] = _JOINED
    for kind in ("Model", "ForConditionalGeneration"):
        joined[f"gemma4.modeling_gemma4.Gemma4{kind}"] = "shard_vlm.gemma:Gemma4MultimodalPolicy"
    return [
        PolicySpec(target=f"transformers.models.{target}", policy=policy, requires=requires)
        for served, requires in (({**joined, **_PARTS}, None), (_THINKERS, "transformers>=5.23.0rc0"))
        for target, policy in served.items()
    ]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    """Test every class, with tower and language model as they are combined in what people run."""
    return [f"shard_vlm.{module}:cases" for module in ("cases", "sound_cases", "omni_cases", "phi4_cases")]
