"""Tiny detectors for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_SIZE, _QUERIES = 40, 5
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
_CAPTURED = (
    "encoder_hidden_states",
    "encoder_attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
)


def resnet(stages: int, *, features: int = 1) -> dict[str, Any]:
    """Return the configuration of a small ResNet with so many stages, the last ones of which are read."""
    return {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 12, 16][:stages],
        "depths": [1] * stages,
        "layer_type": "basic",
        "out_features": [f"stage{stage}" for stage in range(stages - features + 1, stages + 1)],
    }


#: Of detectors that look at places of several feature maps, three or two of them.
_PLACES: dict[str, dict[str, Any]] = {
    "DeformableDetr": {
        "backbone_config": resnet(2, features=2),
        "num_feature_levels": 3,
        "encoder_n_points": 2,
        "decoder_n_points": 3,
        "two_stage_num_proposals": _QUERIES,
    },
    "RTDetr": {
        "backbone_config": {**resnet(3, features=2), "model_type": "rt_detr_resnet"},
        "encoder_hidden_dim": 64,
        "encoder_in_channels": [12, 16],
        "feat_strides": [8, 16],
        "encode_proj_layers": [1],
        "hidden_expansion": 0.5,
        "decoder_in_channels": [64, 64],
        "num_feature_levels": 2,
        "decoder_n_levels": 2,
        "decoder_n_points": 3,
        "num_denoising": 0,  # nothing is denoised without labels
    },
}


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``: 25 tokens of an image or more, and 5 queries."""
    settings: dict[str, Any] = {
        # Masks are drawn with the features of three stages, most detectors read the last ones.
        "backbone_config": resnet(3, features=3) if name.endswith("Segmentation") else resnet(2),
        "use_timm_backbone": False,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 37,  # divides by no number of ranks
        "decoder_ffn_dim": 41,
        "num_queries": _QUERIES,
        "num_labels": 3,
        **next((own for family, own in _PLACES.items() if name.startswith(family)), {}),
        **dict.fromkeys(_DROPOUTS, dropout),
        **options,
    }
    # A ResNet has no attention, and takes no other than this.
    attention = {"": settings.pop("attn_implementation", "eager"), "backbone_config": "eager"}
    settings["attn_implementation"] = attention
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    if settings.get("two_stage"):  # boxes of what the encoder proposes are learned by labels alone
        model.model.decoder.bbox_embed[-1].requires_grad_(False)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return three images (3, 3, 40, 40), or larger ones, of which different parts are padding."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__
    size = 72 if name.endswith("Segmentation") else 48 if name.startswith("RTDetr") else _SIZE
    mask = torch.ones(3, size, size, dtype=torch.long)
    mask[seed % 3, size // 2 :] = 0
    mask[(seed + 1) % 3, :, 3 * size // 4 :] = 0
    return {"pixel_values": torch.randn(3, 3, size, size, generator=generator, dtype=torch.float64), "pixel_mask": mask}


def detection_loss(out: Any) -> Tensor:
    """Return a loss of what is detected: a weighted mean of scores, of boxes, and of masks where there are any."""
    drawn = (out.pred_masks,) if "pred_masks" in out else ()
    return weighted_mean(out.logits, out.pred_boxes, *drawn)


def places_loss(out: Any) -> Tensor:
    """Return a loss of a detector whose encoder proposes places: of these, and of all that the decoder returns."""
    found = [out[name] for name in _FOUND if out.get(name) is not None and len(out[name])]
    return weighted_mean(*found)


#: What such detectors return for a loss, as far as a class does.
_FOUND = (
    *("last_hidden_state", "logits", "pred_boxes", "enc_outputs_class"),
    *("intermediate_logits", "intermediate_reference_points", "enc_topk_logits", "enc_topk_bboxes"),
)


#: Layers of the encoder look at their own values in training, of which there are none where a model is cut.
_SUPPORTS = Supports(tensor_parallel=(1, 2, 3, 4), sequence=True, captured=_CAPTURED, pipeline=False)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "loss": hidden_loss if kind.endswith("Model") else detection_loss,
        "outputs": ("last_hidden_state", "encoder_last_hidden_state"),
        "layers": "decoder.layers" if kind.endswith("Model") else "model.decoder.layers",
        "collectives": (3, 3),
        "sharded": ("self_attn.", "encoder_attn.", "fc1"),
        "supports": _SUPPORTS,
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("with_", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    switches = {
        "attn_implementation": ("eager", "sdpa"),
        "position_embedding_type": ("sine", "learned"),
        "auxiliary_loss": (False, True),
    }
    learned = {"position_embedding_type": ("sine", "learned")}
    # Its dropouts draw for all heads of all rows at once, in another order than for those of a rank.
    written_out = replace(_SUPPORTS, checkpointing=False, dropout=False)
    conditional: dict[str, Any] = {"collectives": (3, 5)}  # positions enter in each layer of the decoder
    return [
        _case("detr_detection", "DetrForObjectDetection", options=switches),
        _case("detr_segmentation", "DetrForSegmentation", layers="detr.model.decoder.layers", tolerance=1e-11),
        _case("detr_model", "DetrModel"),
        _case("conditional_detection", "ConditionalDetrForObjectDetection", options=switches, **conditional),
        _case(
            "conditional_segmentation",
            "ConditionalDetrForSegmentation",
            layers="conditional_detr.model.decoder.layers",
            tolerance=1e-11,
            **conditional,
        ),
        _case("conditional_model", "ConditionalDetrModel", **conditional),
        _case("table_detection", "TableTransformerForObjectDetection", options=learned, supports=written_out),
        _case("table_model", "TableTransformerModel", supports=written_out),
        *_places(),
    ]


def _places() -> list[Case]:
    sizes: dict[str, Any] = {"tensor_parallel": (1, 2, 3, 4), "pipeline": False}
    deformable = Supports(**sizes, captured=("encoder_hidden_states", "decoder_hidden_states"))
    # Between feature maps are convolutions that normalize over a batch.
    mixing = Supports(**sizes, checkpointing=False, micro_batches=False, captured=deformable.captured)
    again: dict[str, Any] = {"two_stage": True, "with_box_refine": True}
    ways = {"attn_implementation": ("eager", "sdpa"), "with_box_refine": (False, True)}
    usual: dict[str, Any] = {"loss": places_loss, "collectives": (3, 4)}
    # Of few values, whose roundings they enlarge: gradients agree to 1e-12, and what is trained with them to 1e-10.
    mixed = {**usual, "tolerance": 1e-9}
    detection = "DeformableDetrForObjectDetection"
    return [
        _case("deformable_detection", detection, supports=deformable, options=ways, **usual),
        _case("deformable_two_stages", detection, supports=deformable, with_=again, **usual),
        _case("deformable_model", "DeformableDetrModel", supports=deformable, **usual),
        *(
            _case(f"{name}_{head}", f"{kind}{end}", supports=mixing, options=options, **mixed, outputs=outputs)
            for name, kind, options in (
                ("rt", "RTDetr", {"attn_implementation": ("eager", "sdpa"), "normalize_before": (False, True)}),
                ("rt_v2", "RTDetrV2", {"decoder_method": ("default", "discrete")}),
            )
            for head, end, outputs in (
                ("detection", "ForObjectDetection", ("logits", "pred_boxes")),
                ("model", "Model", ("last_hidden_state",)),
            )
        ),
    ]
