"""What shardcore uses of transformers, Accelerate and PEFT without a promise of theirs; see `shardcore._private`."""

from __future__ import annotations

from typing import Any

from shardcore._private import PrivateName, Uses

__all__ = [
    "ACCELERATE",
    "OVERRIDDEN",
    "PEFT",
    "TRANSFORMERS",
    "model_of_auto_class",
    "require",
    "require_accelerate",
    "require_peft",
]

#: The methods of `PreTrainedModel` that a save overrides, and the release since which transformers calls them.
OVERRIDDEN = {"_get_files_timestamps": "4", "_upload_modified_files": "4", "should_save_on_this_rank": "5.17"}

#: The methods of `transformers.Trainer` that are done in another way for sharded models.
_TRAINER = (
    "_get_num_items_in_batch",
    "_inner_training_loop",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
)

_MODEL = "transformers.PreTrainedModel"
_SAVED = "finding the entries that transformers saves"

_OF_TRANSFORMERS = (
    *(PrivateName(f"{_MODEL}.{name}", "saving on one rank", "saving", since) for name, since in OVERRIDDEN.items()),
    PrivateName(f"{_MODEL}._tied_weights_keys", _SAVED, "saving"),
    PrivateName(f"{_MODEL}._keys_to_ignore_on_save", _SAVED, "saving"),
    PrivateName(f"{_MODEL}._hf_peft_config_loaded", _SAVED, "saving"),
    PrivateName(f"{_MODEL}._checkpoint_conversion_mapping", _SAVED, "saving", until="5"),
    PrivateName(f"{_MODEL}._fix_state_dict_keys_on_save", _SAVED, "saving", until="5"),
    PrivateName("transformers.core_model_loading.revert_weight_conversion", _SAVED, "saving", since="5"),
    PrivateName("transformers.GenerationMixin._get_stopping_criteria", "ending on all ranks at once", "generation"),
    PrivateName(
        "transformers.models.auto.auto_factory._get_model_class", "the class that an Auto class takes", "loading"
    ),
    PrivateName("transformers.AutoModel._model_mapping", "the class that an Auto class takes", "loading"),
    PrivateName("transformers.PretrainedConfig._attn_implementation", "the attention in use", "flash attention"),
    PrivateName(
        "transformers.utils.output_capturing._active_collector", "what is captured in blocks", "pipelines", since="5.2"
    ),
    PrivateName("transformers.PretrainedConfig._experts_implementation", "how experts compute", "testing", since="5"),
    PrivateName(
        "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate", "gates in turns", "testing", since="5"
    ),
    PrivateName(f"{_MODEL}._supports_sdpa", "the attention that a model has by itself", "drafts"),
    PrivateName(f"{_MODEL}._can_set_attn_implementation", "whether it can be set at all", "flash attention"),
    PrivateName(f"{_MODEL}._supports_flash_attn", "whether a model has flash attention", "flash attention"),
    PrivateName(
        f"{_MODEL}._gradient_checkpointing_func",
        "recomputing one layer",
        "recomputation",
        code=f"{_MODEL}._set_gradient_checkpointing",
    ),
    *(PrivateName(f"transformers.Trainer.{name}", "what it does in another way", "the Trainer") for name in _TRAINER),
    PrivateName(
        "transformers.TrainingArguments._n_gpu",
        "one device for each process",
        "the Trainer",
        code="transformers.TrainingArguments.n_gpu.fget",
    ),
)

_ACCELERATOR = "accelerate.Accelerator"
_STATE = "accelerate.state"
_SCHEDULER = "accelerate.scheduler.AcceleratedScheduler"

_OF_ACCELERATE = (
    PrivateName(f"{_STATE}.PartialState._shared_state", "telling it which ranks there are"),
    PrivateName(f"{_STATE}.AcceleratorState._shared_state", "telling it which ranks there are"),
    PrivateName(f"{_ACCELERATOR}._models", "what was prepared", code=f"{_ACCELERATOR}.free_memory"),
    PrivateName(f"{_ACCELERATOR}._optimizers", "what was prepared", code=f"{_ACCELERATOR}.free_memory"),
    PrivateName(f"{_ACCELERATOR}._schedulers", "what was prepared", code=f"{_ACCELERATOR}.free_memory"),
    PrivateName(f"{_ACCELERATOR}._is_accelerate_prepared", "what was prepared", code=f"{_ACCELERATOR}.prepare"),
    PrivateName(f"{_SCHEDULER}._step_count", "the end of a schedule", code=f"{_SCHEDULER}.step"),
)

_OF_PEFT = (PrivateName("peft.tuners.tuners_utils._maybe_include_all_linear_layers", "which modules 'all-linear' are"),)

# With the first and the last release that the tests have passed with.
TRANSFORMERS = Uses("transformers", ("4.57.6", "5.24"), _OF_TRANSFORMERS)
ACCELERATE = Uses("accelerate", ("1.12.0", "1.15.0"), _OF_ACCELERATE)
PEFT = Uses("peft", ("0.18.0", "0.21.2"), _OF_PEFT)
require, require_accelerate, require_peft = TRANSFORMERS.require, ACCELERATE.require, PEFT.require


def model_of_auto_class(auto: Any, config: Any) -> Any:
    """Return the class that the Auto class ``auto`` takes for ``config``."""
    from transformers.models.auto import auto_factory

    return auto_factory._get_model_class(config, auto._model_mapping)
