"""Fine-tune a vision transformer from a local folder on images that are arrays: handwritten digits of scikit-learn.

    python examples/small.py vit runs/vit
    torchrun --standalone --nproc-per-node 2 examples/vision.py --model runs/vit

`--model` is the folder of any ViT; the digits, 8 x 8 pixels, are made as large as it wants images. Needs shard-vit and
scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import ViTForImageClassification

import shardcore


def main() -> None:
    """Load, train, judge images that were not seen, save, and judge them with what was saved."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with a ViT")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/vision"))
    options = parser.parse_args()

    # 1. Each rank reads its part; the head is new, and the same on all ranks. tp is the number of all ranks.
    model = shardcore.from_pretrained(
        ViTForImageClassification, options.model, seed=0, num_labels=10, dtype=torch.float32
    ).train()
    shardcore.manual_seed(model, 0)  # of dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    # 2. Arrays become images (N, channels, height, width) with values from -1 to 1.
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = interpolate(pixels, size=model.config.image_size).expand(-1, model.config.num_channels, -1, -1)
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1400), slice(1400, None)

    # 3. The training: every rank sees the same batch.
    generator = torch.Generator().manual_seed(0)
    for step in range(1, options.steps + 1):
        rows = torch.randint(1400, (options.batch,), generator=generator)
        batch = {"pixel_values": images[train][rows], "labels": labels[train][rows]}
        loss = model(**{name: values.to(model.device) for name, values in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            say(f"step {step}: loss {loss.item():.4f}")

    # 4. Every rank judges and saves; one writes.
    model.eval()
    seen = judge(model, images[test].to(model.device))
    model.save_pretrained(options.output)
    if first():
        alone = judge(ViTForImageClassification.from_pretrained(options.output), images[test])
        say(f"right of images that were not seen: {(seen.cpu() == labels[test]).float().mean():.1%}")
        say(f"plain transformers judges {int((alone != seen.cpu()).sum())} of them otherwise")


@torch.no_grad()
def judge(model: ViTForImageClassification, images: Tensor) -> Tensor:
    """Return the digit that the model sees in each image."""
    return model(pixel_values=images).logits.argmax(-1)


def first() -> bool:
    """Tell whether this rank speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print on one rank."""
    if first():
        print(text, flush=True)


if __name__ == "__main__":
    main()
