"""Which pipeline a model is a part of: kept on the model, and read through this module alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # it stands above: the pipeline itself uses what reads marks
    from shardcore.pipeline.pipe import Pipeline

__all__ = ["pipeline_of", "set_pipeline"]

_PIPELINE = "_shardcore_pipeline"


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline that a model is this rank's part of; None if it is no part of any."""
    return model.__dict__.get(_PIPELINE)


def set_pipeline(model: nn.Module, pipeline: Pipeline) -> None:
    """Say that ``model`` is this rank's part of ``pipeline``."""
    model.__dict__[_PIPELINE] = pipeline
