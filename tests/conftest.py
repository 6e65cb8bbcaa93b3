"""Settings of all tests. pytest puts this file's folder on sys.path, so that tests share ``helpers``."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples every time, and no limit on the time of one: a loaded machine is no bug.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="every scenario with every controller and number of workers, every method in every example, 2,000 steps "
        "of the soak test: some hours more",
    )
