"""What a pack says about itself to the conformance kit: tiny models, their inputs, and what it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from shardcore.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Supports:
    """What a pack supports, for one case. A closed capability is reported, and sharding with it must raise.

    Attributes:
        tensor_parallel: the sizes at which the case is compared.
        dropout: the case can be built with dropout.
        checkpointing: ``gradient_checkpointing_enable`` works.
        reentrant: it works with ``use_reentrant=True`` too; otherwise a backward with it raises.
        generation: ``generate`` works, with a cache; what makes all words of one call, as CTC does, has none.
        captured: outputs that can be asked for: ``attentions``, ``hidden_states``, ``cross_attentions``, ...
        sequence: ``enable_sequence_parallelism`` works. Give inputs a number of tokens that no size divides.
        context: ``context_parallel_size`` works, where the installed release of the library allows it.
        experts: ``expert_parallel_size`` works: all experts of a block are in one module. Or ``"sliced"``: it does not,
            and there are experts.
        pipeline: the model can be cut into stages, each of which computes what it can of the whole arguments of a call.
        micro_batches: a batch's loss is made of those of its micro-batches. A sum of means over unlike items is not.
        save_pretrained: the model saves itself as an unsharded checkpoint.
        flash_attention: ``enable_flash_attention`` may work, given a device for it.
    """

    tensor_parallel: tuple[int, ...] = (1, 2, 4)
    dropout: bool = True
    checkpointing: bool = True
    reentrant: bool = True
    generation: bool = False
    captured: tuple[str, ...] = ()
    sequence: bool = False
    context: bool = False
    experts: bool | Literal["sliced"] = False
    pipeline: bool = True
    micro_batches: bool = True
    save_pretrained: bool = True
    flash_attention: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tiny model of a pack.

    All callables are functions at the top level of an importable module: the kit calls them in worker processes.

    Attributes:
        name: for messages, such as ``masked_lm``.
        build: makes the unsharded model, with the same weights in every process. Called with keyword options:
            ``dropout=0.1`` for live dropouts (by default all are 0), and ``options`` below.
        inputs: makes the keyword arguments of one call, from the model and a seed; batches of different seeds differ in
            their padding where the model takes a mask. The first dim of every tensor is the batch: the kit takes rows.
        loss: the name of the output with the loss, or a function of the outputs that returns one.
        outputs: names of further outputs that are compared.
        options: further keyword options of ``build``, each with the values that are tried (the first is the default),
            such as ``{"attn_implementation": ("sdpa", "eager")}``.
        layers: the name of the list of blocks, whose collectives are counted.
        collectives: the most collectives that one more block may cost in (forward, backward). At sizes at which ranks
            share key/value heads, the kit allows one more each way: the parts of a head are gathered.
        parts: names of modules or methods that can be called by themselves, besides the base model, the encoder, the
            decoder and ``forward_features``, which are found.
        sharded: names of parameters, or parts of names, at least one of which must be split at every size above 1.
        whole: names of linears of the blocks, or parts of names, that are replicated on purpose (a router).
        refuses: options of ``build`` with which sharding must raise `shardcore.errors.PlanError`.
        supports: what the pack supports for this case.
        policy: the policy, as a class or as ``module:Class``; None finds it as `shardcore.shard` would.
        tolerance: the largest difference from the unsharded model, relative to the largest value (of gradients: to the
            largest of the whole model). Everything is computed in float64, in `no_float32_islands`: a correct pack
            comes to 1e-13 on every processor.
    """

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[[Any, int], dict[str, Tensor]]
    loss: str | Callable[[Any], Tensor] = "loss"
    outputs: tuple[str, ...] = ()
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layers: str = ""
    collectives: tuple[int, int] = (2, 2)
    parts: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    refuses: tuple[Mapping[str, Any], ...] = ()
    supports: Supports = field(default_factory=Supports)
    policy: type[Policy] | str | None = None
    tolerance: float = 1e-12
