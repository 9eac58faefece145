"""Train with Ray: sixteen workers of one device each on a cluster, or two on this machine's CPUs.

    python examples/launch/ray_train.py --workers 16 --tp 8 --gpus --storage /shared/ray
    python examples/launch/ray_train.py --workers 2 --tp 2

Ray Train makes the process group; `shard` takes it as it is. Needs shard-llama and `pip install "ray[train]"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict[str, Any]) -> None:
    """Train on one worker; what Ray sends there imports for itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import shardcore
    from shardcore_loop import ShardedDataLoader

    torch.manual_seed(0)  # the same weights on every worker
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Not `ray.train.torch.prepare_model`, which would wrap the model in DDP.
    model = shardcore.shard(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), tp=settings["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.arange(64 * 32).remainder(251).reshape(64, 32)
    loader = ShardedDataLoader.of(model, list(data), batch_size=8, shuffle=True, seed=0)
    rest = {"model": model, "optimizer": optimizer, "loader": loader}
    loaded = shardcore.load_checkpoint(f"{settings['storage']}/checkpoints", **rest, missing_ok=True)
    for step, batch in enumerate(loader, 1 if loaded is None else loaded.step + 1):
        ids = batch.to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ray.train.get_context().get_world_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step % 4 == 0:
            shardcore.save_checkpoint(f"{settings['storage']}/checkpoints", **rest, step=step, keep_last=2)
    model.save_pretrained(f"{settings['storage']}/model")  # every worker calls it; one writes


def main() -> None:
    """Ask Ray for the workers; when one dies all start again, and go on from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share the model; the others are replicas")
    parser.add_argument("--gpus", action="store_true", help="a device for each worker")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="a folder that all hosts see")
    options = parser.parse_args()

    storage = options.storage.resolve()
    trainer = TorchTrainer(
        train,
        train_loop_config={"tp": options.tp, "storage": str(storage)},
        # Host by host, so that ranks that share a model are on one.
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus, placement_strategy="PACK"),
        torch_config=TorchConfig(backend="nccl" if options.gpus else "gloo"),
        run_config=RunConfig(storage_path=str(storage), failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()
    print(f"the model is in {storage / 'model'}")


if __name__ == "__main__":
    main()
