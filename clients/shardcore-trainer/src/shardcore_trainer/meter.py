"""How fast a Trainer trains, in a line of rank 0 and in what it logs."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback


class MeterCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Puts a `shardcore_loop.StepMeter` around each step of a Trainer.

    ```python
    meter = shardcore_loop.StepMeter(model)
    trainer = Trainer(model=model, callbacks=[MeterCallback(meter)], ...)
    ```

    Rank 0 prints the meter's lines, and its numbers are in what the Trainer of shardcore logs beside the loss, for
    TensorBoard, Weights & Biases, MLflow. Tokens are those of ``input_ids``; evaluations and saves are in no line.

    Args:
        meter: of the model that is trained.
    """

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self._counting: Any = None
        self._running = contextlib.ExitStack()
        self._step: Any = None

    @property
    def numbers(self) -> dict[str, float]:
        """What the last line said."""
        found: dict[str, float] = self._meter.numbers
        return found

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to count."""
        self.abandon()  # a Trainer that looks for a batch that fits begins anew
        self._counting = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        if self._step is not None and ids is not None:
            self._step.tokens += ids.numel()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step, of one batch or of several that are accumulated."""
        self._step = self._running.enter_context(self._meter.step())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it, and say a line where it is time."""
        self._step = None
        self._running.close()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the evaluation out."""
        self._meter.restart()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the save out."""
        self._meter.restart()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count no more."""
        self._running.close()
        self._counting.remove()

    def abandon(self) -> None:
        """Forget the step of a training that has failed, and count no more."""
        self._step = None
        with contextlib.suppress(InterruptedError), self._running:
            raise InterruptedError  # so that the meter leaves it out, and closes a profile
        if self._counting is not None:
            self._counting.remove()
