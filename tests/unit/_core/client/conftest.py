"""Programs that are forks."""

from tests.unit._core.client.forked_programs import forks_if_possible  # noqa: F401
