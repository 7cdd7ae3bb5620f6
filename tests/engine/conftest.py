"""The saver is tested through checkpointers, as those of tests/ddp are."""

from tests.ddp.conftest import directory, ranks, said  # noqa: F401
