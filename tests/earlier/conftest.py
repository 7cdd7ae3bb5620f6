"""Loaded by checkpointers as those of tests/ddp are."""

from tests.ddp.conftest import ranks  # noqa: F401
