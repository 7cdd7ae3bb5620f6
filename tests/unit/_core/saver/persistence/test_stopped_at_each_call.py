"""An agent that is stopped at a system call on the directory, and continued when others have taken its place.

Each call of a publication, and of the deletion that follows it, is tried: on real processes and files.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.policy.retention import KeepLast
from fastckpt._core.retention import retire
from fastckpt._core.saver.persistence import tenure as tenure_module
from fastckpt._core.saver.persistence.opening import Opening
from fastckpt._core.storage.image_source import PublishRequest
from fastckpt.errors import Superseded
from tests.unit._core.saver.persistence.test_tenure import Other, Saver, stop
from tests.unit._core.storage.checkpoints import images
from tests.unit._core.storage.conftest import fast_path  # noqa: F401 (a fixture)

CALLS = ("open", "mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir", "fsync", "fdatasync", "pwrite",
         "ftruncate", "utime")  # fmt: skip
BOTH = ("old", "new")
campaign = pytest.mark.campaign


class Agent(Saver):
    """As `Saver`, of a job of two nodes: both are members of the first history, and each may be alone later."""

    def alone(self) -> None:
        launch = self.tenure._job.launch
        self.tenure.begin_round([launch], launch)
        self.members: tuple[str, ...] = ()

    def save(self, step: int) -> SaveId:
        id = SaveId(self.history, step)
        opening = Opening(id, f"round of {self.tenure._job.launch}", getattr(self, "members", BOTH), self.parent)
        self.tenure.hold(opening)
        place = self._scratch / f"{id.history}-{id.step}"
        self.store.publish(PublishRequest(id, images(place, id), parent=self.parent))
        if self.tenure.check(opening):
            self.tenure.reported(id)
            self.reported.append(id)
        retire(self.store, KeepLast(2), lambda: None)
        return id


def stopping_at(number: int | None) -> list[str]:
    """Have this process stop before the call of that number; the names of those that were made."""
    made: list[str] = []

    def wrap(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            made.append(name)
            if number is not None and len(made) - 1 == number:
                stop()
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    return made


def old_agent(folder: Path, number: int | None) -> Other:
    """One that has saved twice, and stops at a call of the third time."""

    def act() -> object:
        tenure_module.RENEWAL = 1000.0  # it goes on before it would look by itself
        agent = Agent(folder, "old")
        agent.begin()
        for step in (1, 2):
            agent.save(step)
        made = stopping_at(number)
        agent.save(3)
        return {"reported": agent.reported, "calls": [*made]}

    return Other(act)


def calls(folder: Path) -> list[str]:
    """The calls of a publication, with its deletion, in their order."""
    other = old_agent(folder, None)
    said = other.go_on()
    assert isinstance(said, dict), said
    return list(said["calls"])


def take_over(folder: Path, *, as_half: bool) -> tuple[Agent, SaveId]:
    """Begin in the place of the one that is stopped; what was reported first."""
    agent = Agent(folder, "new", take_over=not as_half)
    agent.alone()
    agent.begin()
    step = 4
    while True:
        try:
            return agent, agent.save(step)
        except Superseded:  # something became durable meanwhile: that comes first
            assert agent.tenure.start_over() is not None
            agent.begin()
            step += 1


def try_at(folder: Path, number: int, *, as_half: bool) -> None:
    other = old_agent(folder, number)
    try:
        other.wait_until_stopped()
        agent, first = take_over(folder, as_half=as_half)
        said = other.go_on()
        left = [stored.id for stored in agent.store.checkpoints()]
        assert left[0] == first, (left, said)
        if isinstance(said, dict):  # it had looked before: then this is what the others have resumed
            assert agent.parent is not None and agent.parent >= SaveId(*said["reported"][-1]), (agent.parent, said)
        else:
            assert "which opened history 2: process" in said and "(launch new" in said, said
        assert agent.save(first.step + 1) == max(stored.id for stored in agent.store.checkpoints())
        agent.tenure.close()
    finally:
        other.end()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return calls(tmp_path_factory.mktemp("calls"))


@pytest.mark.parametrize("as_half", [False, True])
@pytest.mark.parametrize("name", ["mkdir", "rename", "unlink", "rmdir"])
def test_an_agent_that_was_stopped_at_the_last_call_of_a_kind_reports_nothing_of_its_own(
    fast_path: Path, made: list[str], name: str, as_half: bool  # noqa: F811
) -> None:  # fmt: skip
    try_at(fast_path, max(number for number, each in enumerate(made) if each == name), as_half=as_half)


@campaign
@pytest.mark.parametrize("as_half", [False, True])
def test_an_agent_that_is_stopped_at_any_call_leaves_one_that_publishes(
    tmp_path: Path, made: list[str], as_half: bool
) -> None:
    assert {"open", "mkdir", "rename", "unlink", "rmdir", "fsync"} <= {*made} and len(made) > 20
    for number in range(len(made)):
        try_at(tmp_path / str(number), number, as_half=as_half)
    print(f"stopped at {len(made)} calls: {made}")
