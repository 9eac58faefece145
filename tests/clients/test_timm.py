"""timm's training tools on a sharded vision transformer give what they give on the unsharded one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

import shardcore
from shardcore.errors import AgreementError, NotSupportedError, WrapError
from shardcore.mesh.context import context_of
from shardcore_loop import WholeTensors
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole

timm = pytest.importorskip("timm")


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
    for name in ("adafactor", "mars", "sgdp", "adamuon", "nadamuon"):
        reference, model = twins()
        refused = create_optimizer_v2(model, opt=name, lr=1e-3)
        with pytest.raises(NotSupportedError, match=r"shardcore_loop\.WholeTensors"):
            step(model, refused, 0)
        groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
        settings = {"opt": name, "lr": 1e-3}
        for each in (reference, model):
            if each is model:
                optimizer = WholeTensors(create_optimizer_v2, groups, **settings)
            else:
                optimizer = create_optimizer_v2(each, weight_decay=0.05, **settings)
            for seed in range(2):
                step(each, optimizer, seed)
        assert_same_parameters(reference, model)


def test_its_optimizers_step_as_unsharded(pool):
    pool.run(optimizers, world=2, timeout=120)


def clips_adaptively() -> None:
    """Norms of whole rows need whole tensors: torch refuses parts."""
    from timm.utils import NativeScaler, dispatch_clip_grad

    from shard_vit import timm_training as ours

    reference, model = twins()
    clipped = []
    for each, clip in ((reference, dispatch_clip_grad), (model, ours.dispatch_clip_grad)):
        pixels, labels = images()
        nn.functional.cross_entropy(each(pixels), labels).backward()
        before = [p.grad.clone() for p in each.parameters() if p.grad is not None]
        clip(each.parameters(), 0.01, mode="agc")
        after = [p.grad for p in each.parameters() if p.grad is not None]
        clipped.append([torch.equal(*map(whole, pair)) for pair in zip(before, after, strict=True)])
    assert clipped[0] == clipped[1]
    assert not all(clipped[0])
    assert_same_gradients(reference, model)
    with pytest.raises(RuntimeError, match="placement changes"):
        dispatch_clip_grad(model.parameters(), 0.01, mode="agc")
    for mode in ("agc", "norm", "value"):
        for each, scaler in ((reference, NativeScaler("cpu")), (model, ours.NativeScaler("cpu"))):
            optimizer = torch.optim.SGD(each.parameters(), lr=1e-2)
            for seed in range(2):  # the second one makes the step
                pixels, labels = images(seed)
                loss = nn.functional.cross_entropy(each(pixels), labels)
                settings = {"clip_grad": 0.01, "clip_mode": mode, "parameters": each.parameters()}
                scaler(loss, optimizer, **settings, need_update=seed == 1)
            optimizer.zero_grad()
        assert_same_parameters(reference, model)


def test_clips_as_unsharded(pool):
    pool.run(clips_adaptively, world=2, timeout=120)


def saver_of(kind: Any, model: Any, optimizer: Any, folder: Path, **more: Any) -> Any:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    args = argparse.Namespace(model="vit")
    return kind(model, optimizer, args=args, checkpoint_dir=str(folder), recovery_dir=str(folder), **more)


def same(one: Any, other: Any, at: str = "") -> None:
    """Compare what two files hold, but for what names a time or a folder."""
    if isinstance(one, torch.Tensor):
        assert not isinstance(other, DTensor), at
        assert_close(one, other, at)
    elif isinstance(one, dict):
        assert list(one) == list(other), at
        for key in one:
            same(one[key], other[key], f"{at}/{key}")
    elif isinstance(one, list | tuple):
        for number, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{at}/{number}")
    elif not callable(one):
        assert one == other, (at, one, other)


def averaged(model: Any, mesh: dict[str, int]) -> tuple[Any, Callable[[], Any]]:
    """Return the mean of the weights, and what brings it up to date; FSDP2 lets no model be copied."""
    from timm.utils import ModelEmaV3

    if context_of(model) is None or "dp" not in mesh:
        mean = ModelEmaV3(model, decay=0.9)
        return mean, lambda: mean.update(model)
    with pytest.raises(NotSupportedError, match=r"second.load_state_dict\(model.state_dict\(\)\)"):
        ModelEmaV3(model, decay=0.9)
    second = shardcore.shard(build(), **mesh)
    second.load_state_dict(model.state_dict())
    both = list(second.parameters()), list(model.parameters())
    return second, lambda: get_ema_multi_avg_fn(0.9)(*both, None)


def saves_and_resumes(mesh: dict[str, int], folder: str) -> None:
    """One file for all ranks, which plain timm reads, and from which ranks and one process go on."""
    from timm.models import load_checkpoint, resume_checkpoint
    from timm.utils import CheckpointSaver

    from shard_vit import timm_training as ours

    runs = []
    for kind, each in ((CheckpointSaver, build()), (ours.CheckpointSaver, shardcore.shard(build(), **mesh))):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        mean, update = averaged(each, mesh)
        where = Path(folder) / kind.__module__
        # The unsharded run is every rank's own; one of them writes.
        saver = saver_of(kind, each, optimizer, where, model_ema=mean, max_history=2)
        returned = []
        for epoch, metric in enumerate((1.0, 3.0, 2.0, 0.5)):
            step(each, optimizer, epoch, update)
            if kind is ours.CheckpointSaver or dist.get_rank() == 0:
                returned.append(saver.save_checkpoint(epoch, metric=metric))
                saver.save_recovery(epoch, batch_idx=1)
                if hasattr(timm.utils.CheckpointSaver, "save_milestone"):
                    saver.save_milestone(epoch)
        dist.barrier()
        names = [(Path(path).name, metric) for path, metric in saver.checkpoint_files]
        runs.append((each, optimizer, where, names, returned, Path(saver.curr_recovery_file).name))
    (reference, theirs, plain, *wanted), (model, _, sharded, *got) = runs
    if dist.get_rank() == 0:
        assert got == wanted
    assert got[1] == [(1.0, 0), (3.0, 1), (3.0, 1), (3.0, 1)]
    files = sorted(path.name for path in plain.iterdir())
    assert sorted(path.name for path in sharded.iterdir()) == files
    for name in files:
        same(*(torch.load(path / name, weights_only=False) for path in (plain, sharded)), name)

    last = str(sharded / "last.pth.tar")
    other = build()
    load_checkpoint(other, last, use_ema=False, weights_only=False)
    assert_same_parameters(reference, other)
    # Their next step is that of the training that was never stopped.
    step(reference, theirs, 9)
    for again in (build(), shardcore.shard(build(), **mesh)):
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2, eps=1e-3)
        assert resume_checkpoint(again, last, optimizer, weights_only=False) == 4
        step(again, optimizer, 9)
        assert_same_parameters(reference, again)
    step(model, runs[1][1], 9)  # saving changed nothing
    assert_same_parameters(reference, model)


@pytest.mark.parametrize(("world", "mesh"), [(2, {"tp": 2}), (2, {"dp": 2}), (4, {"tp": 2, "dp": 2})], ids=str)
def test_saves_and_resumes_as_unsharded(pool, tmp_path, world, mesh):
    pool.run(saves_and_resumes, mesh, str(tmp_path), world=world, timeout=180)


def fails_to_save(folder: str) -> None:
    from shard_vit.timm_training import CheckpointSaver

    model = shardcore.shard(build(), tp=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    saver = CheckpointSaver(model, optimizer, checkpoint_dir=str(Path(folder) / "nowhere"))
    with pytest.raises(RuntimeError if dist.get_rank() == 0 else AgreementError, match="nowhere"):
        saver.save_checkpoint(0)
    assert saver.optimizer is optimizer
    saver.checkpoint_dir = folder
    saver.save_checkpoint(0)
    dist.barrier()
    assert (Path(folder) / "last.pth.tar").exists()


def test_a_failure_to_save_is_one_of_all_ranks(pool, tmp_path):
    pool.run(fails_to_save, str(tmp_path), world=2, timeout=60)


def tools(folder: str) -> None:
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

    # Saved by timm's own class: one folder for each rank goes on exactly; rank 0's file on another rank is refused.
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
    pool.run(tools, str(tmp_path), world=2, timeout=120)
