"""The saver is tested through checkpointers, as those of tests/e2e/ddp are."""

from tests.e2e.ddp.conftest import directory, ranks, said  # noqa: F401
