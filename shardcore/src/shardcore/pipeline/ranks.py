"""Who takes part in a pipeline: this rank's place in it, and who has to hear of a failure."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import ProcessGroup

from shardcore.agree.agreement import Report, agree
from shardcore.mesh import ShardContext, axis_name, group_of

__all__ = ["Ranks"]


class Ranks:
    """This rank's place on the axis ``pp``, and the ranks around it. Every rank of the mesh makes one.

    Args:
        context: that of the model.

    Attributes:
        group: the ranks of the pipeline, which pass micro-batches on to each other.
        rank: this rank's position.
        size: how many they are.
        beside: how many ranks have the stages of this rank: all of one place in the pipeline.
        everybody: all ranks; None for the default process group.
    """

    def __init__(self, context: ShardContext) -> None:
        mesh, sizes = context.mesh, context.sizes
        axis = context.axis("pp")
        self.group: ProcessGroup = axis.group
        self.rank, self.size = axis.rank, axis.size
        self.beside = mesh.size() // self.size
        self.everybody = group_of(mesh)
        self._replicas = sizes.replicas
        names = tuple(name for name in ("pp", "tp") if axis_name(mesh, name) is not None)
        # Ranks that are given one batch: those of one replica.
        self._alike = self.everybody if self._replicas == 1 else group_of(mesh[names])

    def begin(self, failure: BaseException | None, told: Sequence[tuple[str, str]], number: int) -> int:
        """Raise on all ranks if one of them failed, or if those of one replica were given different things.

        Args:
            failure: what failed on this rank.
            told: what has to be the same on the ranks of a replica.
            number: a number that this rank has drawn.

        Returns:
            The number of the first rank of the replica.

        Raises:
            AgreementError: another rank failed, or they differ.
        """
        report = Report(items=tuple(told), seed=number) if failure is None else Report.of_error(failure)
        if self._replicas == 1:
            return agree(report, failure, group=self.everybody)[0].seed
        try:
            number = agree(report, failure, group=self._alike)[0].seed
        except BaseException as error:
            failure = error
        self.agree(failure)
        return number

    def agree(self, failure: BaseException | None) -> None:
        """Raise on all ranks if one of them failed.

        Args:
            failure: what failed on this rank.

        Raises:
            AgreementError: another rank failed.
        """
        agree(Report() if failure is None else Report.of_error(failure), failure, group=self.everybody)
