"""Pipelines: a model cut into stages, each of which runs the model's own forward on the whole arguments of a call.

The life of a stage; in brackets the file that has it:

```
shard(model, pp=2)                             train_step(batch), on every rank alike   [model, engine]
------------------                             ------------------------------------------------------------
whole model, sharded over tp                   micro-batches, grouped by their form     [microbatches, steps]
 |                                             ranks compare what they were given       [ranks]
 |                                              |
 +- copy on meta ---- StageTracer ------------> traces a form that is new -> StageMetadata: what parts return,
 |                    [tracing]                 |  what crosses to each stage             [metadata]
 |                                              |  how the loss is reduced                [losses]
 |                                              v
 +- parameters of other stages are pruned      a schedule of torch, which for each micro-batch   [schedules]
    [pruning]                                   |  receives, runs and sends a SafeStage   [torch_stage]
     |                                          v
     +- Stage, one or more for each rank -----> the model's forward: parts of other stages return NaN,
        [stage]                                 |  the stage's first block is called with what arrived,
                                                |  the first block of the next stage ends the forward
                                                v
                                               gradients of what several ranks hold are added   [shared]
                                               the loss is sent to all
```

What lives how long:

* the model keeps its `Pipeline`, which keeps tracer and stages: they die together;
* `StageMetadata` is kept of the last 64 forms of micro-batches; schedules, with their `SafeStage` and what it receives
  in, of the last two;
* the handler of a stage's calls is there while the stage runs. In between another one lets blocks be recomputed in the
  backward, and refuses calls of what other ranks hold;
* what arrived at a stage hangs on the tensor that stands for it in the forward, and dies with the graph;
* a stage that failed sends zeros until the end of the schedule; then all ranks raise, and there are no gradients.
"""

from shardcore.pipeline.engine import Pipeline
from shardcore.pipeline.metadata import Boundary, StageMetadata
from shardcore.pipeline.microbatches import micro_batches
from shardcore.pipeline.model import PipelinedModel
from shardcore.pipeline.schedules import SCHEDULES
from shardcore.pipeline.stage import PrunedModel, Stage
from shardcore.pipeline.tracing import StageTracer
from shardcore.plan.cut import Cut, balanced

__all__ = [
    "SCHEDULES",
    "Boundary",
    "Cut",
    "Pipeline",
    "PipelinedModel",
    "PrunedModel",
    "Stage",
    "StageMetadata",
    "StageTracer",
    "balanced",
    "micro_batches",
]
