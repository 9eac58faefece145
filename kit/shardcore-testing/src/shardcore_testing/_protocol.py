"""What the pool and its workers say to each other; imports no torch, so that neither side pays for it early."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRef:
    """Where a worker finds a function: its module, the module's file and the name inside it."""

    module: str
    file: str | None
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionRef:
        """Return the reference of a function at the top level of a module, or of a static method.

        Raises:
            TypeError: the function cannot be reached by its name (nested, lambda, partial, bound method).
        """
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        qualname = getattr(function, "__qualname__", None)
        if module is None or qualname is None or _reach(module, qualname) != function:
            raise TypeError(
                f"{function!r} cannot be sent to a worker: a worker finds a function by its module and its name, so it "
                "must be defined at the top level of a module, undecorated or decorated in place. Move it there and "
                "pass what it closes over as arguments."
            )
        file = getattr(module, "__file__", None)
        if file is None and module.__name__ == "__main__":
            raise TypeError(
                f"{qualname} cannot be sent to a worker: it was typed in, there is no file to load it from."
            )
        return cls(module=module.__name__, file=file and str(Path(file).resolve()), qualname=qualname)

    def load(self) -> Callable[..., Any]:
        """Return the function; its module is imported, or loaded from its file, once per worker."""
        function: Callable[..., Any] = _reach(self._module(), self.qualname)
        return function

    def _module(self) -> ModuleType:
        loaded = sys.modules.get(self.module)
        if loaded is not None and self._is_home(getattr(loaded, "__file__", None)):
            return loaded
        if self.file is None or self._importable():
            return importlib.import_module(self.module)
        # A test module that pytest named itself. It keeps that name here, so that what is pickled by reference (a
        # dataclass, an exception of the test) means the same on both sides.
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be loaded as a Python module", path=self.file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module

    def _importable(self) -> bool:
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):  # a parent that is no package; a module without a spec, such as __main__
            return False
        return spec is not None and self._is_home(spec.origin)

    def _is_home(self, file: str | None) -> bool:
        return file == self.file or (file is not None and str(Path(file).resolve()) == self.file)


def _reach(module: ModuleType, qualname: str) -> Any:
    target: Any = module
    for name in qualname.split("."):
        target = getattr(target, name, None)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The first words of a worker.

    Attributes:
        port: where rank 0 keeps the store at which the ranks meet; 0 on the others.
        note: what is special about its device, such as other ranks on it.
        complaint: why it cannot work.
    """

    port: int = 0
    note: str = ""
    complaint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Leave the default process group, make a new one, and prove that it works; answered by an empty `Reply`.

    Attributes:
        world: number of its ranks.
        generation: grows with every group of a pool.
        port: where rank 0 keeps the store at which the ranks meet.
        timeout: limit of one collective, in seconds.
    """

    world: int
    generation: int
    port: int
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call on one rank.

    Attributes:
        function: what to call.
        call: pickled ``(args, kwargs, warning filters, without islands)``; read after the module of ``function`` was
            loaded, whose classes it may hold.
        grouped: whether to run in the group that was joined last; else there is none when the function starts.
        env: environment variables for the time of the call.
    """

    function: FunctionRef
    call: bytes
    grouped: bool
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: the rank.
        error: name of the exception's type, or what became of the process.
        details: the traceback on that rank, ending in the message; or a sentence.
        at: when, in seconds of the machine's monotonic clock, comparable between ranks.
    """

    rank: int
    error: str
    details: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a rank answers to a task: a pickled ``result`` or a ``failure``.

    Attributes:
        result: the pickled value.
        failure: set if the rank failed.
        grouped: whether the worker still is in the group that it was asked to be in.
    """

    result: bytes = field(default=b"", repr=False)
    failure: Failure | None = None
    grouped: bool = True

    def value(self) -> Any:
        """Return what the function returned."""
        return pickle.loads(self.result)
