"""A rendezvous without torch's detours."""

from pathlib import Path

from tests.e2e.launcher.conftest import Jobs, program


def test_rendezvous_rounds_complete_at_the_first_attempt(jobs: Jobs) -> None:
    """In a process of its own: nothing else ends the sockets of torch's stores."""
    assert jobs.run(launcher=Path(program("rendezvous.py")).read_text()).stdout == "as it should be\n"
