"""Loaded by checkpointers as those of tests/e2e/ddp are."""

from tests.e2e.ddp.conftest import directory, ranks  # noqa: F401
