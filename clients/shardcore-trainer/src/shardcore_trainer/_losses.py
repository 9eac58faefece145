"""The Trainer's losses of models that average over the labels of a call, whatever they are told."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore.mesh.context import unwrapped
from shardcore_trainer._replicas import Replicas

#: What a forward of transformers calls that averages over all labels but those of -100.
_MEANS = {"CrossEntropyLoss", "cross_entropy"}

#: What it names if it can be told over how many, or if it compares other labels than those that it is given.
_OTHERWISE = {"loss_function", "num_items_in_batch", "shift_labels", "shift_logits"}

_LABELS = "labels"
_ITEMS = "num_items_in_batch"


class Losses:
    """How a Trainer weighs the losses of replicas; before the class of the Trainer.

    A Trainer tells a model the number of labels of the whole step, if it takes any keyword, and multiplies the loss by
    the number of processes, whose gradients are averaged. Half of transformers' models take any keyword, and average
    over the labels of the call nevertheless. Weighed by its part of the labels of all replicas, the average over the
    replicas is the mean over all of these labels: what the unsharded model computes of the same rows.
    """

    args: Any
    accelerator: Any
    label_names: Any
    label_smoother: Any
    compute_loss_func: Any
    model_accepts_loss_kwargs: bool
    _replicas: Replicas | Any
    _counted: bool
    _scaled: bool

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, and on wish the outputs, of a batch of this replica."""
        native = super().compute_loss  # type: ignore[misc]  # of the Trainer
        labels = self._labels_to_weigh(native, model, inputs)
        found = native(model, inputs, *args, **kwargs)
        if labels is None:
            return found
        items = inspect.signature(native).bind(model, inputs, *args, **kwargs).arguments.get(_ITEMS)
        multiplied = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs and items is not None
        several = isinstance(found, tuple)
        loss = self._weighed(found[0] if several else found, labels, 1 if multiplied else self._replicas.count)
        return (loss, *found[1:]) if several else loss

    def _labels_to_weigh(self, native: Any, model: Any, inputs: Any) -> Tensor | None:
        """Return the labels over which a replica's loss is a mean; None if it is to be left as it is."""
        if self._replicas is None or self._replicas.count == 1:
            return None
        if native.__func__ is not transformers.Trainer.compute_loss:
            return None  # a loss of another's
        if self.label_smoother is not None or self.compute_loss_func is not None:
            return None
        given = [name for name in self.label_names if inputs.get(name) is not None]
        labels = inputs.get(_LABELS)
        if given != [_LABELS] or not isinstance(labels, Tensor) or not averages_its_labels(model):
            return None
        return labels

    def _weighed(self, loss: Tensor, labels: Tensor, times: int) -> Tensor:
        """Return ``loss``, a mean over ``labels``, times their part of the labels of all replicas, and ``times``."""
        own = labels.ne(-100).sum().to(loss.dtype) * int(self._counted)
        part = own / self._replicas.reduce(own, "sum", 1.0)
        self._scaled = True
        # The mean of no labels is no number.
        return torch.where(own > 0, loss * (part * times), torch.zeros_like(loss))


def averages_its_labels(model: Any) -> bool:
    """Tell whether ``model`` is one of transformers whose forward itself averages a cross entropy over ``labels``."""
    model = unwrapped(model)
    if (adapted := getattr(model, "get_base_model", None)) is not None:
        model = adapted()
    for each in type(model).__mro__:
        forward = inspect.unwrap(vars(each)["forward"]) if "forward" in vars(each) else None
        if forward is None or forward.__module__.partition(".")[0] == "shardcore":
            continue
        if forward.__module__.partition(".")[0] != "transformers":
            return False
        code = forward.__code__
        names = {*code.co_names, *code.co_varnames, *filter(lambda value: isinstance(value, str), code.co_consts)}
        return bool(names & _MEANS) and not names & _OTHERWISE
    return False
