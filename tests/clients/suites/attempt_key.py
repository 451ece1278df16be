"""A pytest plugin for the SDKs' own tests: their clients have the attempt's key, where those tests have a made-up one."""

from __future__ import annotations

import os
import sys


def pytest_collection_finish() -> None:
    """The conftest of the tests has been imported by now, and its fixtures read the key when they make a client."""
    sys.modules["tests.conftest"].api_key = os.environ["AGL_KEY"]
