"""Reader of the JSON files that users give to commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 2**28
"""Most bytes that are read, more than any such file has: a device file may never end."""


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        ValueError: it is not JSON.
        OSError: it cannot be read.
    """
    with open(path) as file:
        try:
            text = file.read(MOST_CHARACTERS + 1)
            if len(text) > MOST_CHARACTERS:
                raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from None
        except RecursionError:
            raise ValueError(
                f"{path} is not a JSON file: its lists or objects are nested too deeply"
            ) from None
