"""timm's training tools on a sharded vision transformer give what they give on the unsharded one."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.errors import NotSupportedError, WrapError
from shardcore.optimizers import WholeTensors
from shardcore.testing.parity import assert_close, assert_same_gradients, assert_same_parameters

timm = pytest.importorskip("timm")

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from test_docs import DOCS, _blocks  # noqa: E402


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 11}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).double()
    for name, p in model.named_parameters():  # the bias of keys has no true gradient
        p.requires_grad_("qkv.bias" not in name)
    return model


def twins() -> tuple[Any, Any]:
    return build(), shardcore.shard(build(), tp=2)


def images(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, 11, (4,), generator=generator)


def step(model: Any, optimizer: Any, seed: int, after: Callable[[], Any] = lambda: None) -> None:
    pixels, labels = images(seed)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(pixels), labels).backward()
    optimizer.step()
    after()


def optimizers() -> None:
    from timm.optim import create_optimizer_v2, param_groups_weight_decay

    for name in ("adamw", "lamb", "sgd", "adan", "lars", "nadamw"):
        reference, model = twins()
        for each in (reference, model):
            optimizer = create_optimizer_v2(each, opt=name, lr=1e-3, weight_decay=0.05, layer_decay=0.7)
            for seed in range(2):
                step(each, optimizer, seed)
        assert_same_parameters(reference, model)
    for name in ("adafactor", "mars"):
        reference, model = twins()
        refused = create_optimizer_v2(model, opt=name, lr=1e-3)
        with pytest.raises(NotSupportedError, match=r"shardcore\.optimizers\.WholeTensors"):
            step(model, refused, 0)
        for each in (reference, model):
            groups = param_groups_weight_decay(each, 0.05)
            settings = {"opt": name, "lr": 1e-3}
            made = WholeTensors(create_optimizer_v2, groups, **settings)
            optimizer = made if each is model else create_optimizer_v2(groups, **settings)
            for seed in range(2):
                step(each, optimizer, seed)
        assert_same_parameters(reference, model)


def test_its_optimizers_step_as_unsharded(pool):
    pool.run(optimizers, world=2, timeout=120)


def clips_adaptively(loop: str) -> None:
    """Norms of whole rows need whole tensors: torch refuses parts, and the page has the ``loop``."""
    from timm.utils import dispatch_clip_grad

    reference, model = twins()
    for each in (reference, model):
        pixels, labels = images()
        nn.functional.cross_entropy(each(pixels), labels).backward()
    before = [p.grad.clone() for p in reference.parameters() if p.grad is not None]
    dispatch_clip_grad(reference.parameters(), 0.01, mode="agc")
    after = [p.grad for p in reference.parameters() if p.grad is not None]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    exec(loop, {"model": model})
    assert_same_gradients(reference, model)
    with pytest.raises(RuntimeError, match="placement changes"):
        dispatch_clip_grad(model.parameters(), 0.01, mode="agc")


def resumes_an_unsharded_run(folder: str, code: str) -> None:
    """The weights and the optimizer of an unsharded run's file, as the page has it."""
    from timm.utils import CheckpointSaver

    reference, model = twins()
    theirs, ours = (torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (reference, model))
    step(reference, theirs, 0)
    run = Path(folder) / "unsharded"
    if dist.get_rank() == 0:
        run.mkdir()
        args = argparse.Namespace(model="vit")
        CheckpointSaver(reference, theirs, args=args, checkpoint_dir=str(run)).save_checkpoint(0, metric=1.0)
    dist.barrier()
    with contextlib.chdir(run):
        exec(code, {"model": model, "optimizer": ours, "torch": torch, "timm": timm})
    step(reference, theirs, 1)
    step(model, ours, 1)
    assert_same_parameters(reference, model)


def tools(folder: str, made: str, loop: str, resume: str) -> None:
    import numpy as np
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.models import load_checkpoint, resume_checkpoint
    from timm.utils import CheckpointSaver, ModelEmaV3, dispatch_clip_grad

    reference, model = twins()
    means, features = [], []
    for each in (reference, model):
        np.random.seed(0)
        pixels, soft = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=11)(*images())
        SoftTargetCrossEntropy()(each(pixels), soft).backward()
        dispatch_clip_grad(each.parameters(), 0.01, mode="norm")
        dispatch_clip_grad(each.parameters(), 0.001, mode="value")
        features.append((each.forward_features(pixels), each.forward_intermediates(pixels)[1][0]))
    assert_same_gradients(reference, model)
    for one, other in zip(*features, strict=True):
        assert_close(one, other, "features")
    trained = []
    for each in (reference, model):
        mean = ModelEmaV3(each, decay=0.9)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        for seed in range(2):
            step(each, optimizer, seed, lambda mean=mean, each=each: mean.update(each))
        means.append(mean.module)
        trained.append(optimizer)
    assert_same_parameters(*means)

    plain = str(Path(folder) / "plain.pth")
    if dist.get_rank() == 0:
        torch.save({"state_dict": build().state_dict()}, plain)
    dist.barrier()
    other = shardcore.shard(build(), tp=2)
    nn.init.zeros_(other.head.weight)
    load_checkpoint(other, plain)
    assert_same_parameters(build(), other)

    exec(made, {"model": build(), "timm": timm})
    clips_adaptively(loop)
    resumes_an_unsharded_run(folder, resume)

    # One folder for each rank goes on exactly; rank 0's file on another rank is refused.
    own = Path(folder) / str(dist.get_rank())
    own.mkdir()
    args = argparse.Namespace(model="vit")
    CheckpointSaver(model, trained[1], args=args, checkpoint_dir=str(own)).save_checkpoint(0, metric=1.0)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, eps=1e-3)
    resume_checkpoint(other, str(own / "last.pth.tar"), optimizer, weights_only=False)
    step(reference, trained[0], 2)
    step(other, optimizer, 2)
    assert_same_parameters(reference, other)
    dist.barrier()
    if dist.get_rank():
        with pytest.raises(WrapError, match="is the part of the rank at"):
            resume_checkpoint(other, str(Path(folder) / "0" / "last.pth.tar"), weights_only=False)


def test_its_tools_work_as_unsharded(pool, tmp_path):
    shown = [code for language, code, _ in _blocks(DOCS / "timm.md") if language == "python"]
    pool.run(tools, str(tmp_path), *shown, world=2, timeout=120)
