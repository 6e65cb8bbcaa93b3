"""Names of methods of version 0.1.0, and their present spelling.

They are accepted for a version. Files of that version (`VERSION` 1 of names, or none) keep the names' meaning of then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from horovod_quant.kernels import notices
from horovod_quant.schemes.eden_widths import MOST_BITS, MOST_GATHERED, balanced

VERSION = 2
"""Version of methods' names in JSON files and saved states."""

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
"""Former names without the bits, and their present spelling."""

_ANOTHER_MEANING = ("qsgd", "nuqsgd", "eden")
"""Names of `_FORMER` that have another meaning today."""


def present(name: str, version: int | None = None, workers: int | None = None) -> str | None:
    """Return a former name's present spelling; None if unchanged or unknown.

    Args:
        name: name of a method.
        version: version of the names in a file; None if a user wrote the name, who is warned.
        workers: number of workers of the file, on which EDEN's reducers depended; None if unknown.
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
    """Warn of names that a user has written, once per name."""
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
    """Return the spelling of EDEN's reducer bits in version 0.1.0.

    The reducers added up to twice the workers' nmse.
    """
    if not family.startswith("eden") or not 1 <= bits < MOST_BITS or (workers or 3) <= MOST_GATHERED:
        return ""
    trellis = family == "eden-trellis"
    server = bits if workers is None else balanced(bits, workers, trellis, 2.0)
    return "" if workers is not None and server == balanced(bits, workers, trellis) else f"-server{server}"
