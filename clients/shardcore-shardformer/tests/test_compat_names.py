"""The page for those who come from elsewhere answers every name of the documents that it compares with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "compat.md"

# Every name of the documents that the page answers; what is not here is prose.
NAMES = re.findall(
    r"\S+",
    """
colossalai.shardformer colossalai.launch_from_torch ShardConfig ShardFormer Shard pg_manager shard_config
init_distributed shard_model optimize shard_dataset ProcessGroupManager process_group_manager BertForMaskedLM BertConfig
BertForMaskedLM_ MyPolicy Policy set_model preprocess module_policy new_model_class postprocess ModulePolicyDescription
attribute_replacement param_replacement sub_module_replacement SubModuleReplacementDescription
ParamReplacementDescription suffix target_module kwargs ParallelModule from_native_module Linear1D_Col ModelSharder
replace_model_class replace_module _replace_module ShardPolicy shard_rowwise example_replace_weight
tensor_parallel_size data_parallel_size pipeline_parallel_size tensor_parallel_mode inference_only gather_output
use_flash_attention tensor_parallel_process_group pipeline_stage_manager enable_tensor_parallelism
enable_fused_normalization enable_flash_attention enable_jit_fused enable_sequence_parallelism enable_sequence_overlap
gradient_checkpoint_config GradientCheckpointConfig enable_all_optimization fp8_communication parallel_output
extra_kwargs PipelineStageManager Booster HybridParallelPlugin execute_pipeline return_loss return_outputs tp_size
pp_size num_microbatches microbatch_size zero_stage precision initial_scale hybrid_parallel model_type target_f1
finetune.py _criterion output_transform_fn train_epoch train_dataloader_iter flash_attn xFormers cutlass_op apex
num_heads LlamaDecoderLayer GPT2ForSequenceClassification ViTForImageClassification ChatGLMConfig ChatGLMModel
ChatGLMForConditionalGeneration chatglm2_6b RoBERTa ALBERT ERNIE GPT-Neo GPT-J BEiT Swin OPT BLOOM T5 GPT-2 Whisper SAM
BLIP-2 Falcon GLM ViT LLaMA BERT Qwen ColoTensor ColoParameter ColoTensorSpec ProcessGroup tp_degree dp_degree
tp_world_size ShardSpec num_partitions ReplicaSpec ComputeSpec ComputePattern ComputePattern.TP1D set_dist_spec
to_replicate from_torch_tensor colossalai.launch free_port print_rank_0 name_parameters mp.spawn run_dist_tests
test_dist_cases run_func ParallelStyle _prepare_input _prepare_output RowwiseParallel ColwiseParallel PairwiseParallel
PairwiseParallelStyle parallelize_module parallelize_plan parallel_plan ParallelPlan tp_mesh_dim
torch.distributed.tensor_parallel DeviceMesh get_dim_groups device_mesh_2D FullyShardedDataParallel _parallelize_mlp
_parallelize_multihead_attn _parallelize_linear MakeInputReplicated MakeInputShard MakeOutputReplicated DemoModel
SimpleModel AttentionModule CustomizedMLP nn.MultiheadAttention nn.Transformer LazyInitContext
""",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_lists_every_name(name):
    assert re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)|\.{re.escape(name)}(?!\w)", DOCS.read_text()), name
