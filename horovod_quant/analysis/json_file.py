"""Reading the JSON files that commands are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 2**28
"""More than any of these files has; a device may never end."""


def read_json(path: str | Path) -> Any:
    """The value in a file.

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
