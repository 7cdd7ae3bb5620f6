"""Agents of several nodes on this host, of which one is lost and comes back."""

import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.launcher.conftest import COMMAND, OURS, Jobs, Launch, until
from tests.support.ports import free_port

SECRET = "a secret of the job, for tests"
SCRIPT = """
import os, pathlib, time
folder = pathlib.Path(os.environ["JOB_FOLDER"])
name = "-".join(os.environ[each] for each in ("NODE", "WORLD_SIZE", "RANK"))
(folder / f"up-{name}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
"""


class Nodes:
    """Agents that meet at a list of endpoints; workers leave a file ``up-<node>-<world size>-<rank>`` each."""

    def __init__(self, jobs: Jobs, *options: str, launcher: str) -> None:
        self._jobs, self._options, self._launcher = jobs, options, launcher
        (jobs.folder / "train.py").write_text(SCRIPT)

    def start(self, node: int) -> Launch:
        memory = self._jobs.folder / f"memory-{node}"
        memory.mkdir(mode=0o700, exist_ok=True)
        arguments = ("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-id=lost", *self._options, "train.py")
        variables = {"NODE": str(node), "FASTCKPT_SHM_DIR": str(memory), "FASTCKPT_MEMORY": "off"}
        return self._jobs.start(*arguments, launcher=self._launcher, **variables)

    def ranks(self, world: int) -> dict[int, int]:
        """Ranks by nodes of the workers that were started in a world of this size; asks once."""
        found = [path.name.split("-")[1:] for path in self._jobs.folder.glob(f"up-*-{world}-*")]
        return {int(node): int(rank) for node, _, rank in found}

    def forget(self) -> None:
        for path in self._jobs.folder.glob("up-*"):
            path.unlink()


@pytest.mark.parametrize("held", [True, False], ids=["holder-of-the-store", "other-node"])
def test_a_node_that_is_killed_is_lost_and_comes_back_while_the_other_one_keeps_its_rank(
    jobs: Jobs, tmp_path: Path, held: bool
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    endpoints = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    options = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoints}", f"--fast-secret-file={secret}")
    nodes = Nodes(jobs, *options, launcher=COMMAND if held else OURS)
    port = int(endpoints.split(",")[0].rsplit(":", 1)[1])
    agents = {0: nodes.start(0)}
    until(lambda: listens(port), "the first agent holds the store")
    agents[1] = nodes.start(1)
    until(lambda: len(nodes.ranks(2)) == 2, "both train")
    lost, other = (0, 1) if held else (1, 0)
    kept = nodes.ranks(2)[other]
    nodes.forget()
    agents[lost].kill()
    agents[lost].wait()
    until(lambda: nodes.ranks(1) == {other: 0}, "the other one trains alone")
    nodes.forget()
    agents[lost] = nodes.start(lost)
    until(lambda: len(nodes.ranks(2)) == 2, "both train again")
    assert nodes.ranks(2)[other] == 0, f"it has kept its rank, which was {kept} at first"
    (tmp_path / "go").touch()
    for agent in agents.values():
        text = agent.ends()
        assert SECRET not in text
        assert "Traceback (most recent call last)" not in text
        assert not held or "frame #" not in text, "a stack of C++"


def test_an_agent_that_waits_for_others_says_what_they_need_and_ends_by_ctrl_c_without_a_traceback(jobs: Jobs) -> None:
    port = free_port()
    (jobs.folder / "train.py").write_text(SCRIPT)
    agent = jobs.start("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "train.py")
    waits = until(lambda: agent.stderr, "a line about the other node")
    assert waits.startswith(f"fastckpt-run: 1 of 2 nodes have come to 127.0.0.1:{port}; waiting for the others")
    assert "They need the same --nnodes, --rdzv-id, --rdzv-endpoint and secret (FC-036, " in waits
    agent.send_signal(signal.SIGINT)
    assert agent.ends(1) == f"{waits}fastckpt-run: stopped by SIGINT\n"


def listens(port: int) -> bool:
    """Whether somebody listens at a port of this host."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
