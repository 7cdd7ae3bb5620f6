"""fastckpt-run with faults in the agent: ``launch.py <out> <fastckpt-run's arguments>``."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt_run.main import main
from tests.faults.faults import from_text, inject_in_agent
from tests.faults.forks import with_a_template
from tests.support.launchers import FORKED


def launch(folder: Path, *arguments: str) -> None:
    told = folder / "faults"
    inject_in_agent(from_text(told.read_text()) if told.exists() else [], folder)
    main(arguments)


def may_fork() -> bool:
    """Whether this process is a fork, which is fit to be forked, and its workers shall be forked as well."""
    return FORKED in os.environ and os.environ["FASTCKPT_PRELOAD"] != "off"


if group := os.environ.get("TEST_CGROUP"):
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))  # before anything is forked, which would stay outside
# A worker of the template, which is a fork of this process, ends here.
if __name__ == "__main__" and (not may_fork() or with_a_template()):
    launch(Path(sys.argv[1]), *sys.argv[2:])
