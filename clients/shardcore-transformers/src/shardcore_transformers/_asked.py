"""Who reads an attribute: a property may refuse one library that goes by it, and be harmless to who looks at all."""

from __future__ import annotations

import inspect


def asked_by(*modules: str) -> bool:
    """Tell whether the property that calls this is read by code of a module whose name begins with one of ``modules``.

    Modules around the one that is asked (adapters, a compiled one) pass on what they do not have themselves.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # this function, and the property
        frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_name == "__getattr__":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(modules)
