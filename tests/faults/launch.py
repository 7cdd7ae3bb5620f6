"""fastckpt-run with faults in the agent: ``launch.py <out> <fastckpt-run's arguments>``.

Where the launcher is a fork that has imported torch, so is the template, from which its workers are forked as ever.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt_run.main import main
from fastckpt_run.preload import template, template_process
from fastckpt_run.preload.preloader import ForkedWorker
from tests.faults.faults import inject_in_agent
from tests.support.launchers import FORKED

HERE = str(Path(sys.argv[0]).parent)


def wait_to_be_a_template(agent: int, orders: socket.socket) -> None:
    """Become the template of this agent's workers once it starts one; the end of a worker ends it as well."""
    message, descriptors, _, _ = socket.recv_fds(orders, 1024, 3)
    if not message:
        os._exit(0)
    orders.close()
    sys.path[:] = [entry for entry in sys.path if entry != HERE]  # which an executed one would not have
    os.setsid()
    for number, descriptor in enumerate(descriptors[:2], start=1):
        os.dup2(descriptor, number)
    run, end = template.main(message.decode(), descriptors[2], agent)
    end(run())


def with_a_template() -> bool:
    """Have this process fork its template, which is here already; False in the workers of that template."""
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    if (pid := os.fork()) == 0:
        ours.close()
        wait_to_be_a_template(agent, theirs)
        return False
    theirs.close()

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        [descriptor] = options["pass_fds"]
        socket.send_fds(ours, [arguments[4].encode()], [options["stdout"], options["stderr"], descriptor])
        ours.close()
        template_process.Popen = subprocess.Popen  # another one is executed
        return ForkedWorker(arguments, pid)

    template_process.Popen = start
    return True


def launch_from_fork(folder: str, *arguments: str) -> None:
    """Launch, with a template that is a fork of this process; a worker of that ends here."""
    if not may_fork() or with_a_template():
        inject_in_agent(Path(folder))
        main(arguments)


def may_fork() -> bool:
    """Whether this process is a fork, which is fit to be forked, and its workers shall be forked as well."""
    return FORKED in os.environ and os.environ["FASTCKPT_PRELOAD"] != "off"


if group := os.environ.get("TEST_CGROUP"):
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))  # before anything is forked, which would stay outside
if __name__ == "__main__":
    launch_from_fork(*sys.argv[1:])
