"""`from_pretrained`, which needs a library of models only when it is called."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from shardcore.clients import loader_of
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError
from shardcore.fsdp.phase import Wrap
from shardcore.inferred import Inference
from shardcore.plugins.unserved import installing
from shardcore.policy import Policy


def from_pretrained(
    model_class: type[Any] | str,
    path: str | os.PathLike[str],
    *model_args: Any,
    shard_config: ShardConfig | None = None,
    policy: Policy | type[Policy] | Mapping[str, Any] | Literal["infer"] | None = None,
    infer: Inference = "proved",
    wrap: Wrap = True,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Load what a library has saved into a sharded model; each rank reads the parts that it keeps.

    ```python
    model = shardcore.from_pretrained(LlamaForCausalLM, path, tp=4, dp=2, dtype=torch.bfloat16)
    ```

    Equal to ``model_class.from_pretrained(path)`` and `shardcore.shard`, but that the model is never there as a whole:
    a rank needs room for its part and for what one tensor of it is made from. Every rank makes the call, and sees the
    files under the same path. Reports of the library (missing, unexpected and mismatched keys) come from the first
    rank alone. The model is in evaluation mode, as after the native call.

    Args:
        model_class: a class of a library whose client loads (`shardcore.clients`), an Auto class, or the name of one
            (``package.module.Class`` for others).
        path: a folder, or a name of the hub: its configuration and safetensors files are then downloaded to the cache.
        *model_args: as of the native ``from_pretrained``.
        shard_config: the configuration; fields of it among ``options`` override it.
        policy: as of `shardcore.shard`.
        infer: as of `shardcore.shard`.
        wrap: as of `shardcore.shard`.
        seed: of parameters that no file holds (a new head): initialised as the native class does, with the same values
            on every mesh.
        **options: fields of `ShardConfig` (``tp``, ``dp``, ...) and options of the native ``from_pretrained``:
            ``config``, ``dtype``, ``attn_implementation``, ``key_mapping``, ``ignore_mismatched_sizes``,
            ``output_loading_info``, ``variant``, ``subfolder``, ``quantization_config``, ... and attributes of the
            model's configuration.
            ``use_safetensors=False`` reads pickled files (``.bin``), with ``weights_only``.

    Returns:
        The model, or ``(model, info)`` with ``output_loading_info=True``.

    Raises:
        ConfigError: there is no such class or checkpoint, a file is cut short, or an option makes no sense here.
        AgreementError: another rank failed, or reads something else.
        ShardcoreError: what `shardcore.shard` raises.
    """
    load = loader_of(model_class)
    if load is None:
        raise ConfigError(
            "shardcore.from_pretrained asks the client for the model's library, and none is installed that loads"
            f"{installing('loaders')}. A pack of the library's models brings it. Other models: "
            "shardcore.shard(model, weights=...)"
        )
    loaded: Any = load(
        model_class,
        path,
        *model_args,
        shard_config=shard_config,
        policy=policy,
        infer=infer,
        wrap=wrap,
        seed=seed,
        **options,
    )
    return loaded
