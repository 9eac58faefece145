"""Packs that are wrong on purpose when they run (random numbers, generation, cost), and cases that show nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kit_net
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit_net import Net, NetPolicy, on_stream
from torch import Tensor, nn
from wrong import Replaced

from shardcore.nn import ColumnLinear, RowLinear
from shardcore.policy import Policy
from shardcore.styles import (
    attribute,
    col,
    row,
)
from shardcore_shardformer import ModulePolicyDescription, SubModuleReplacementDescription

# --- random numbers --------------------------------------------------------------------------------------------------


class _OwnMasks(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        with torch.random.fork_rng():
            torch.manual_seed(next(_COUNT) * 1000 + dist.get_rank())
            return F.dropout(input, self.p, self.training)


_COUNT = iter(range(10**9))


class DifferentMasks(Replaced):
    """H6, H40: every rank drops other elements of a replicated activation."""

    suffix = ".drop"

    def spoil(self, module: nn.Module) -> None:
        if isinstance(module, nn.Dropout):
            module.__class__ = _OwnMasks


class _SameMasks(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        with torch.random.fork_rng():
            torch.manual_seed(next(_COUNT))
            return F.dropout(input, self.p, self.training)


class SameMasks(Replaced):
    """H6: every rank drops the same elements of its part."""

    suffix = "attention.drop"

    def spoil(self, module: nn.Module) -> None:
        module.__class__ = _SameMasks


class _NoMasks(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        return input


class ForgottenDropout(Replaced):
    """A dropout is lost."""

    suffix = "mlp.drop"

    def spoil(self, module: nn.Module) -> None:
        module.__class__ = _NoMasks


class Drifting(NetPolicy):
    """H19: replicated gradients differ by rounding, so that parameters drift apart."""

    def postprocess(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name == "decoder.norm.weight":
                parameter.register_post_accumulate_grad_hook(_round)


def _round(parameter: Tensor) -> None:
    parameter.grad._local_tensor.mul_(1 + 1e-12 * dist.get_rank())


class SamplesAlone(NetPolicy):
    """H40: every rank samples from its user's generator."""

    def new_model_class(self) -> Any:
        return _SamplesAlone


class _SamplesAlone(Net):
    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        return super().generate(input_ids, **options)


_SamplesAlone.__name__ = "Net"


class NoCache(NetPolicy):
    """H18: generation runs without its cache."""

    def new_model_class(self) -> Any:
        return _NoCache


class _NoCache(Net):
    def generate(self, input_ids: Tensor, use_cache: bool = True, **options: Any) -> Any:
        out = on_stream(Net.generate)(self, input_ids, use_cache=False, **options)
        if hasattr(out, "past_key_values"):
            out.past_key_values = None
        return out


_NoCache.__name__ = "Net"


class WholeCache(NetPolicy):
    """H18: every rank caches all heads."""

    def new_model_class(self) -> Any:
        return _WholeCache


class _WholeCache(Net):
    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        out = on_stream(Net.generate)(self, input_ids, **options)
        for layer in getattr(getattr(out, "past_key_values", None), "layers", ()):
            layer.keys = layer.keys.repeat(1, 2, 1, 1)
        return out


_WholeCache.__name__ = "Net"


# --- cost and checkpoints ---------------------------------------------------------------------------------------------


class TooManyCollectives(NetPolicy):
    """H1: every column linear gathers and enters for itself."""

    def mlp(self) -> list[Any]:
        gathered = [col(name, gather_output=True) for name in ("mlp.gate", "mlp.up")]
        return [*gathered, row("mlp.down", parallel_input=False)]


class LosesState(NetPolicy):
    """A state dict that says something else than the parameters."""

    def postprocess(self) -> None:
        self.model.register_state_dict_post_hook(_spoil_state)


def _spoil_state(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state["decoder.norm.weight"] = state["decoder.norm.weight"] * 2


class BringsABuffer(NetPolicy):
    """A tensor that the model's library knows nothing of."""

    def postprocess(self) -> None:
        self.model.register_buffer("extra", torch.zeros(2))


class DescribedWrongly(Policy):
    """A description in Shardformer's words that swaps row and column."""

    def module_policy(self) -> Any:
        rows = NetPolicy().module_policy()
        swapped = ModulePolicyDescription(
            sub_module_replacement=[
                SubModuleReplacementDescription(suffix="gate", target_module=RowLinear),
                SubModuleReplacementDescription(suffix="up", target_module=RowLinear),
                SubModuleReplacementDescription(suffix="down", target_module=ColumnLinear),
            ]
        )
        block = [r for r in rows["Block"] if "mlp" not in str(r)]
        return {**rows, "Block": block, "Mlp": swapped}

    checks = NetPolicy.checks
    stages = NetPolicy.stages


class FailsOnOneRank(NetPolicy):
    """A module that raises on one rank, and leaves the other waiting."""

    def postprocess(self) -> None:
        self.model.decoder.norm.register_forward_hook(_fail)


def _fail(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("only here")


# --- cases that cannot show mistakes, or claim too little -----------------------------------------------------------


def build_at_random(**options: Any) -> Net:
    model = kit_net.build(**options)
    with torch.no_grad():
        model.encode.weight.copy_(torch.randn(model.encode.weight.shape, generator=_OTHER))
    return model


_OTHER = torch.Generator()
_OTHER.seed()


class Forgetful(Net):
    """H18: it does not return the cache that it generates with."""

    def generate(self, *args: Any, return_dict_in_generate: bool = False, **kwargs: Any) -> Any:
        tokens = super().generate(*args, **kwargs)
        return SimpleNamespace(sequences=tokens) if return_dict_in_generate else tokens


def build_without_cache(**options: Any) -> Net:
    model = kit_net.build(**options)
    model.__class__ = Forgetful
    return model


class TwoLayers(Net):
    """It needs as many layers as it was made with, as one does that weighs the outputs of all of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.decoder.layers) != 2:
            raise ValueError("a weight for each of 2 layers")
        return super().forward(*args, **kwargs)


def build_of_two_layers(**options: Any) -> Net:
    model = kit_net.build(**options)
    model.__class__ = TwoLayers
    return model


def _write(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    args[0].mul_(1.0)


def build_writing(**options: Any) -> Net:
    """Return a model with a part that writes into what it is given."""
    model = kit_net.build(**options)
    model.decoder.layers[1].mlp.register_forward_pre_hook(_write)
    return model


class LastDrop(nn.Dropout):
    """A class of modules that only the last block has."""


def build_with_a_last_block_of_its_own(**options: Any) -> Net:
    model = kit_net.build(**options)
    model.decoder.layers[-1].drop.__class__ = LastDrop
    return model


class NamesTheLastDrop(NetPolicy):
    def module_policy(self) -> dict[str, Any]:
        return {**super().module_policy(), "LastDrop": [attribute("p", float)]}


def same_inputs(model: Any, seed: int) -> dict[str, Tensor]:
    return kit_net.inputs(model, 0)


def loss_of_several_rows(out: Any) -> Tensor:
    return out["loss"] if out["logits"].size(0) > 1 else out["loss"] * torch.nan


def no_loss(out: Any) -> Tensor:
    return out["logits"]
