"""Shardformer's quick start, word for word but for its import lines and the device, with the packs as installed."""

from __future__ import annotations

import os

import torch
from transformers import BertConfig, BertForMaskedLM

from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close

IMPORTS = """
import shardcore as colossalai
from shardcore_shardformer import ShardConfig, ShardFormer
from transformers import BertConfig, BertForMaskedLM
"""

QUICK_START = """
# launch colossalai
colossalai.launch_from_torch()

# create model
config = BertConfig.from_pretrained('bert-base-uncased')
model = BertForMaskedLM.from_pretrained('bert-base-uncased', config=config)

# create huggingface model as normal
shard_config = ShardConfig(tensor_parallel_size=2,
                        data_parallel_size=1,
                        gather_output=True)
shard_former = ShardFormer(shard_config=shard_config)
shard_former.init_distributed()
sharded_model = shard_former.shard_model(model).to('cuda')

# do everything like normal
...
"""


def quick_start(folder):
    os.chdir(folder)
    space = {}
    device = "'cuda'" if torch.cuda.is_available() else "'cpu'"
    exec(compile(IMPORTS + QUICK_START.replace("'cuda'", device), "quick start", "exec"), space)
    ids = torch.arange(12).view(2, 6)
    reference = BertForMaskedLM.from_pretrained("bert-base-uncased").eval()
    sharded = space["sharded_model"].eval()
    assert_close(reference(input_ids=ids).logits, sharded(input_ids=ids).logits, "logits", 1e-5)
    assert context_of(space["model"]).size == 2


def test_the_quick_start_of_shardformer(pool, tmp_path):
    config = BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert-base-uncased")
    pool.run(quick_start, tmp_path, world=2, process_group=False)
