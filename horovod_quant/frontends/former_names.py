"""Methods' names of version 0.1.0, which are accepted for a version: what they meant, and how that is spelled today.

Files that were written then (`VERSION` 1 of names, or none stated) are read with the meaning of then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from horovod_quant.kernels import notices
from horovod_quant.schemes.eden import MOST_BITS, MOST_GATHERED, balanced

VERSION = 2
"""Of methods' names, which JSON files and saved states say."""

_FORMER = {
    "qsgd": "qsgd-{bits}-l2-bucket1024-allgather",
    "qsgdinf": "qsgd-{bits}-bucket1024-allgather",
    "qsgd-alltoall": "qsgd-{bits}-l2-bucket1024-alltoall",
    "qsgdinf-alltoall": "qsgd-{bits}-bucket1024-alltoall",
    "nuqsgd": "nuqsgd-{bits}-allgather",
    "nuqsgd-alltoall": "nuqsgd-{bits}-alltoall",
    "global-qsgd-l2": "global-qsgd-{bits}-l2",
    "global-qsgd-exp": "global-qsgd-{bits}-exponential",
    "global-qsgd-rotated": "global-qsgd-{bits}-rotate",
    "eden": "eden-{bits}{server}",
    "eden-trellis": "eden-{bits}{server}-trellis",
}
"""Former names without the bits, and how they are spelled today."""

_ANOTHER_MEANING = ("qsgd", "nuqsgd", "eden")
"""Those of `_FORMER` that mean something else today."""


def present(name: str, version: int | None = None, workers: int | None = None) -> str | None:
    """The present spelling of a former name; None where it has its meaning still, or never had one.

    Args:
        name: of a method.
        version: of the names in a file; None where a user has written it, who is warned.
        workers: who used the method then, None if that is not known: EDEN's reducers depended on their number.
    """
    if re.fullmatch("((nu|global-)?qsgd-.*)-joint(-.*)?", name):
        correlated = name.replace("-joint", "-correlated")
        notices.deprecated(f"the method {name!r} is now called {correlated!r}", FutureWarning)
        return correlated
    if version is not None and version >= VERSION:
        return None
    spelled = _spelled(name, workers)
    if spelled in (None, name) or (version is None and _family(name) in _ANOTHER_MEANING):
        return None
    if version is None:
        notices.deprecated(f"the method {name!r} is now called {spelled!r}", FutureWarning)
    return spelled


def warn_of_another_meaning(names: Iterable[str]) -> None:
    """Warn of names that a user has written, once for each."""
    for name in names:
        spelled = _spelled(name, None)
        if spelled not in (None, name) and _family(name) in _ANOTHER_MEANING and name not in _warned:
            _warned.add(name)
            notices.deprecated(
                f"the method {name!r} now has its class's default arguments; what it meant in version 0.1 is called "
                f"{spelled!r}",
                FutureWarning,
            )


_warned: set[str] = set()


def _family(name: str) -> str:
    return name.rpartition("-")[0]


def _spelled(name: str, workers: int | None) -> str | None:
    family, bits = _family(name), name.rpartition("-")[2]
    if family not in _FORMER or not re.fullmatch("[0-9]{1,9}", bits):
        return None
    return _FORMER[family].format(bits=int(bits), server=_server(family, int(bits), workers))


def _server(family: str, bits: int, workers: int | None) -> str:
    """The spelling of the width of reducers in version 0.1.0.

    They added up to twice the workers' nmse.
    """
    if not family.startswith("eden") or not 1 <= bits < MOST_BITS or (workers or 3) <= MOST_GATHERED:
        return ""
    trellis = family == "eden-trellis"
    server = bits if workers is None else balanced(bits, workers, trellis, 2.0)
    return "" if workers is not None and server == balanced(bits, workers, trellis) else f"-server{server}"
