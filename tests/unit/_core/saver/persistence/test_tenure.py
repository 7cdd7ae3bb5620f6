"""Jobs that have lost sight of each other: each is a process, and one is stopped between two operations."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.format.manifest import ROUND
from fastckpt._core.io.directory_root import DirectoryRoot
from fastckpt._core.policy.retention import KeepLast
from fastckpt._core.retention import retire
from fastckpt._core.saver.persistence import predecessor
from fastckpt._core.saver.persistence import tenure as tenure_module
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.saver.persistence.predecessor import Job
from fastckpt._core.saver.persistence.tenure import Tenure
from fastckpt._core.storage.history import Record
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.errors import PlaceInUse, Superseded
from tests.support.waits import until
from tests.unit._core.saver.persistence.other_jobs import Other, stop
from tests.unit._core.storage.checkpoints import images

PART = 25


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is as long as it is, but a small part of it."""
    monkeypatch.setattr(tenure_module, "RENEWAL", tenure_module.RENEWAL / PART)
    for name in ("STALE", "PATIENCE", "PAUSE", "LONGEST_LOOK"):
        monkeypatch.setattr(predecessor, name, getattr(predecessor, name) / PART)


class Saver:
    """What a job's agent does with one place, as far as it matters here."""

    def __init__(self, root: Path, name: str, **options: bool) -> None:
        self.store = CheckpointDirectory(root / "run")
        self.tenure = Tenure(self.store, Job(name, "/run", **options))
        self._scratch = root / f"{name}-{os.getpid()}"
        self.reported: list[SaveId] = []

    def begin(self) -> SaveId | None:
        """Wait, and choose what to resume; the history to come is the one after all that are known."""
        newest = self.tenure.enter()
        self.parent = max((stored.id for stored in self.store.checkpoints()), default=None)
        self.tenure.saw(self.parent)
        self.history = 1 + max(newest, self.parent.history if self.parent else 0)
        return self.parent

    def save(self, step: int) -> SaveId:
        id = SaveId(self.history, step)
        self.tenure.hold(Opening(id, f"round of {self.tenure._job.launch}", (), self.parent))
        self.store.publish(
            PublishRequest(id, images(self._scratch / f"{id.history}-{id.step}", id), parent=self.parent)
        )
        self.tenure.check()
        self.reported.append(id)
        retire(self.store, KeepLast(2), lambda: None)
        return id


def stopping_before(owner: object, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
    """Have this process stop before it calls that, once."""
    real, struck = getattr(owner, name), []

    def stopped(*arguments: object, **options: object) -> object:
        if not struck and when(*arguments):
            struck.append(1)
            stop()
        return real(*arguments, **options)

    setattr(owner, name, stopped)


@pytest.fixture
def old(fast_path: Path, start: Callable[..., Other]) -> Callable[[], Other]:
    """An old job that has saved step 1, and stops before the rename by which step 2 is to count."""

    def act() -> object:
        tenure_module.RENEWAL = 1000.0  # it goes on before it would look by itself
        saver = Saver(fast_path, "old")
        saver.begin()
        saver.save(1)
        stopping_before(DirectoryRoot, "move", lambda _, source, target: target.name.startswith("checkpoint-"))
        return [*saver.save(2)]

    return lambda: start(act)


def ids(saver: Saver) -> list[SaveId]:
    return [stored.id for stored in saver.store.checkpoints()]


def test_a_step_published_after_another_job_began_is_not_reported_durable(fast_path, old) -> None:
    """By the look after the rename: else a step would be told durable that nobody will resume."""
    other, new = old(), Saver(fast_path, "new")
    assert new.begin() == (1, 1), "an old job that stands still is waited for, and no longer"
    assert new.save(3) == (2, 3)
    said = other.go_on()
    assert isinstance(said, str) and said.startswith("Superseded: ") and "another job, which opened history 2" in said
    assert ids(new)[0] == (2, 3)
    new.tenure.close()


def test_a_step_reported_durable_before_a_history_opens_is_resumed_first(fast_path, old) -> None:
    """By the look behind the record: else it would end a line of training that was told durable."""
    other, new = old(), Saver(fast_path, "new")
    assert new.begin() == (1, 1)
    assert other.go_on() == [1, 2], "nobody had opened a newer history yet"
    with pytest.raises(Superseded, match=r"step 2 of history 1 became durable .* it has to resume that one"):
        new.save(2)
    assert new.tenure.lost and new.tenure.start_over() == (1, 2) and not new.tenure.lost
    assert new.begin() == (1, 2)
    assert new.history == 3 and new.save(3) == (3, 3) and ids(new) == [(3, 3), (1, 2)]
    new.tenure.close()


@pytest.mark.parametrize("token", ["of these workers", "of workers before"])
def test_a_history_opens_while_a_save_of_the_one_before_becomes_durable(fast_path, token: str) -> None:
    """A step that is saved twice opens a history; only of other workers must what is published then be resumed."""
    job = Saver(fast_path, "one")
    job.begin()
    earlier, later = SaveId(1, 1), SaveId(2, 1)
    details = {ROUND: token}
    job.tenure.hold(Opening.of(earlier, details))
    job.store.publish(PublishRequest(earlier, images(fast_path / "image", earlier), details=details))
    # The agent's thread that publishes has not reported it yet, and another one opens the next history.
    opening = Opening.of(later, {ROUND: "of these workers"})
    if token == opening.token:
        job.tenure.hold(opening)
        assert not job.tenure.lost
    else:
        with pytest.raises(Superseded, match="step 1 of history 1 became durable"):
            job.tenure.hold(opening)
    job.tenure.close()


def test_of_two_jobs_that_waited_for_the_same_job_one_continues(fast_path, old, start) -> None:
    """Both have seen that it is stale; the record of the next history decides."""
    old()
    one, two = Saver(fast_path, "one"), Saver(fast_path, "two")

    def act() -> object:
        two.begin()
        stopping_before(two.store.histories, "create")  # when it has looked once more
        return [*two.save(3)]

    other = start(act)
    assert one.begin() == (1, 1) and one.save(2) == (2, 2)
    assert "has been taken by another job, which opened history 2" in str(other.go_on())
    assert ids(one) == [(2, 2), (1, 1)]
    one.tenure.close()


def test_a_live_job_is_waited_for_and_never_superseded_without_consent(fast_path) -> None:
    """However long it does nothing but renew its record; with its end, or its consent, others go on."""
    saver = Saver(fast_path, "one")
    saver.begin()
    saver.save(1)
    with pytest.raises(PlaceInUse, match=r"another job, which lives: process \d+ on .*\(launch one.* history 1 since"):
        Saver(fast_path, "two").begin()
    assert Saver(fast_path, "three", take_over=True).begin() == (1, 1)
    assert Saver(fast_path, "one").begin() == (1, 1), "one launch does not wait for itself"
    saver.tenure.close()
    assert Saver(fast_path, "two").begin() == (1, 1) and saver.save(2) == (1, 2)


def test_a_history_record_that_was_removed_is_written_again(fast_path) -> None:
    """Somebody has emptied the directory: the next save opens its history once more."""
    saver = Saver(fast_path, "one")
    saver.begin()
    saver.save(1)
    (saver.store.path / ".fastckpt/history-1").unlink()
    until(lambda: saver.tenure._held is None, "the next renewal")
    saver.save(2)
    assert saver.store.histories.read(1).launch == "one"
    saver.tenure.close()


def test_a_removed_history_record_is_not_opened_by_a_second_job(fast_path, start) -> None:
    """By one that has stood still before it made it, while others opened that history, and newer ones, and swept."""

    def act() -> object:
        saver = Saver(fast_path, "old")
        saver.begin()
        stopping_before(saver.store.histories, "create")
        saver.tenure.hold(Opening(SaveId(saver.history, 1), "round"))
        return "it has it"

    other = start(act)
    histories = Saver(fast_path, "new").store.histories
    assert histories.create(Record(2, launch="new"))
    said = str(other.go_on())
    assert said.startswith("Superseded: ") and "which opened history 2" in said
