"""What fastckpt warns of is heard."""

import logging

import pytest


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the launcher's tests gave its logger a handler of its own."""
    monkeypatch.setattr(logging.getLogger("fastckpt"), "propagate", True)
