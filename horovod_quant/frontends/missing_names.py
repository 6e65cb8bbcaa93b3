"""Remedies for names that a module does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ELSEWHERE = {
    "Compression": "Horovod's own are in hvd.Compression; here write, for example, GlobalQSGD()",
    "QSGDinf": "write QSGD(), whose default is the max norm",
    "DRIVE": "write EDEN(bits=1)",
    "Birder": "write BinSGDM()",
}
"""Names that users know from papers and from Horovod."""


def message(module: str, name: str, known: Iterable[str]) -> str:
    """Return the message of an AttributeError for a missing name."""
    lacking = f"module {module!r} has no attribute {name!r}"
    if name.startswith("__"):  # Python itself asks
        return lacking
    if name in _ELSEWHERE:
        return f"{lacking}; {_ELSEWHERE[name]}"
    plain = {each.lower().replace("_", ""): each for each in known}
    nearest = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1)
    return f"{lacking}; did you mean {plain[nearest[0]]!r}?" if nearest else lacking
