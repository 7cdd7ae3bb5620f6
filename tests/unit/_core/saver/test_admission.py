"""Jobs of one host that want the memory of one directory: each is a process of its own."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory import locks, processes
from fastckpt._core.memory.arena import Arena
from fastckpt._core.saver import admission
from fastckpt._core.saver.admission import admit
from fastckpt._core.saver.persistence.predecessor import Job
from fastckpt._core.saver.persistence.tenure import Opening, Tenure
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PersistError
from tests.unit._core.saver.persistence.other_jobs import Other, stop
from tests.unit._core.saver.persistence.test_tenure import soon  # noqa: F401 (a fixture)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:  # noqa: F811
    monkeypatch.setattr(admission, "PATIENCE", 1.5)
    monkeypatch.setattr(admission, "GIVE_WAY", 1.0)


class Launch:
    """What a launch does with the memory and the directory that it has, as far as it matters here."""

    def __init__(self, root: Path, name: str, **options: bool) -> None:
        self.store = CheckpointDirectory(root / "run")
        self.job = Job(name, str(root / "run"), **options)
        self.tenure = Tenure(self.store, self.job)
        self.ending = threading.Event()
        self._path = root / "arena"

    def admit(self) -> Arena:
        return admit(self._path, self.job, self.tenure, self.ending)

    def begin(self, step: int) -> Arena:
        """Own the memory, and the history that is saved in; nothing is saved in step 0."""
        arena = self.admit()
        arena.make_slots(1)
        (arena.slots[0] / "held").write_text(str(step))
        history = self.tenure.enter() + 1
        if step:
            self.tenure.hold(Opening(SaveId(history, step), "round"))
        return arena

    def leave(self, arena: Arena) -> None:
        self.tenure.close()
        arena.release()


def owning(
    root: Path, start: Callable[..., Other], then: Callable[[Launch, Arena], object] = lambda *_: 0, *, step: int = 1
) -> Other:
    """A launch that has saved a step, and stops."""

    def act() -> object:
        one = Launch(root, "one")
        arena = one.begin(step)
        stop()
        return then(one, arena)

    return start(act)


def until_lost(launch: Launch, arena: Arena) -> object:
    while not launch.tenure.lost:
        time.sleep(0.01)
    launch.leave(arena)
    return launch.tenure.lost


def at_first_wait(launch: Launch, act: Callable[[], object]) -> None:
    """Have something happen when the launch has seen that it must wait."""
    real, done = launch.ending.wait, []

    def wait(timeout: float | None = None) -> bool:
        if not done:
            done.append(1)
            act()
        return real(timeout)

    launch.ending.wait = wait  # type: ignore[method-assign]


def test_a_job_waits_for_no_record_of_an_agent_whose_memory_it_has_and_whose_container_was_killed(
    tmp_path: Path, start, caplog, monkeypatch
) -> None:
    with monkeypatch.context() as patch:  # in a pid namespace of its own, as its records tell
        patch.setattr(processes, "pid_namespace", lambda: 1)
        other = owning(tmp_path, start)
    two = Launch(tmp_path, "two")
    os.kill(other.pid, signal.SIGKILL)
    two.admit()  # and killed as well, before it has saved anything: its lock ends with the descriptor
    two.tenure.close()
    for lock in [*locks._held]:
        locks.close_lock(lock)
    three = Launch(tmp_path, "three")
    arena = three.admit()
    assert arena.adopted and arena.ended == ("one", "two")
    assert three.tenure.enter() == 1 and caplog.messages == []
    three.leave(arena)


def test_a_waiting_job_continues_when_the_owner_of_the_memory_is_killed(tmp_path: Path, start, caplog) -> None:
    other, two = owning(tmp_path, start), Launch(tmp_path, "two")
    at_first_wait(two, lambda: os.kill(other.pid, signal.SIGKILL))
    arena = two.admit()
    assert arena.adopted and (arena.slots[0] / "held").read_text() == "1"
    [line] = caplog.messages
    assert line.startswith("waiting, for up to 2 s, for process ") and f" {other.pid} on " in line
    assert two.tenure.enter() == 1
    two.leave(arena)


@pytest.mark.parametrize("step", [0, 1])
def test_a_superseded_owner_releases_the_memory_whether_it_has_saved_or_not(tmp_path: Path, start, step: int) -> None:
    other, two = owning(tmp_path, start, until_lost, step=step), Launch(tmp_path, "two", take_over=True)
    at_first_wait(two, lambda: os.kill(other.pid, signal.SIGCONT))
    arena = two.admit()
    assert (arena.slots[0] / "held").read_text() == str(step)
    assert f"which opened history {1 + step}: process {os.getpid()} on " in str(other.go_on())
    assert two.tenure.enter() == 1 + step, "it is its own, and no save is in it"
    two.tenure.hold(Opening(SaveId(2 + step, 2), "round"))
    assert two.store.histories.read(2 + step).launch == "two"
    two.leave(arena)


def test_a_suspended_owner_is_killed_by_the_job_that_supersedes_it(tmp_path: Path, start, caplog) -> None:
    other, two = owning(tmp_path, start, until_lost), Launch(tmp_path, "two", take_over=True)
    arena = two.admit()
    assert os.WTERMSIG(os.waitpid(other.pid, 0)[1]) == signal.SIGKILL
    assert (arena.slots[0] / "held").read_text() == "1" and two.tenure.enter() == 2
    assert caplog.messages[-1].startswith(f"killed process {other.pid} on ")
    two.leave(arena)


def test_an_owner_is_not_killed_while_the_directory_does_not_answer(tmp_path: Path, start) -> None:
    other, two = owning(tmp_path, start, lambda *_: "alive"), Launch(tmp_path, "two", take_over=True)
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "run").touch()
    with pytest.raises(PersistError):
        two.admit()
    assert other.go_on() == "alive"


def test_a_waiting_job_that_ends_stops_waiting_and_leaves_no_open_record(tmp_path: Path, start) -> None:
    other, two = owning(tmp_path, start, until_lost), Launch(tmp_path, "two", take_over=True)
    at_first_wait(two, two.ending.set)
    with pytest.raises(PersistError, match="the job ended while it waited for process"):
        two.admit()
    record = two.store.histories.read(2)
    assert record.launch == "two" and record.closed
    assert "another job, which opened history 2" in str(other.go_on())
