"""A `SentenceTransformer` holds a model of transformers, which is what can be sharded."""

from __future__ import annotations

from torch import nn

from shardcore.errors import NotSupportedError

#: What each kind of pipeline does; its trainer has its name.
_DOES = {
    "CrossEncoder": "predicts",
    "MultiVectorEncoder": "encodes",
    "SentenceTransformer": "encodes",
    "SparseEncoder": "encodes",
}


def attached_to(model: nn.Module) -> None:
    """Refuse a whole pipeline of sentence-transformers, and name what in it to shard.

    Raises:
        NotSupportedError: ``model`` holds models of transformers as modules of sentence-transformers do.
    """
    name = type(model).__name__
    if not type(model).__module__.startswith("sentence_transformers."):
        return
    inside = [path for path, module in model.named_modules() if hasattr(type(module), "auto_model")]
    if not inside:
        return
    first = f"[{inside[0]}]" if inside[0] else ""
    kinds = [cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _DOES]
    kind = kinds[0] if kinds else "SentenceTransformer"
    raise NotSupportedError(
        f"a {name} is no model of transformers, but holds one. Shard that, in place: shardcore.shard(model{first}."
        f"auto_model, ...) with the same arguments, and go on with the {name}, which {_DOES[kind]}, trains "
        f"(shardcore_trainer.sharded({kind}Trainer)) and saves as ever"
    )
