"""The work that a loss would cost, in all states of a job: a table of what the saver knows and what follows."""

import pytest

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.saver.stats import TIMES, Copies, SaverStats
from fastckpt_run.watch.unsaved_work import Unsaved, reached, unsaved_work

HERE = "/checkpoints"
STARTED, NOW = 100.0, 200.0
OLD = SaveId(1, 40)
"""Of an earlier launch."""


def at(step, history=2):
    return SaveId(history, step)


def rank(steps, named=0, step=-1, loaded=-1, beat=NOW):
    return Telemetry(steps=steps, named=named, step=step, loaded=loaded, beat=round(beat * 1e9))


def stats(loaded=None, loaded_at=110.0, **known):
    remote = Copies("s3://b", newest=known.pop("remote")) if "remote" in known else None
    return SaverStats(HERE, loaded=loaded, loaded_at=loaded_at, remote=remote, **known)


def costs(stats, *ranks, since=STARTED):
    (found,) = unsaved_work([stats], {HERE: ranks}, NOW, since)
    return found.worker, found.node, found.storage


NOTHING = Unsaved(None, 0, 0.0)


@pytest.mark.parametrize(
    ("known", "ranks", "worker", "node"),
    [
        pytest.param(stats(loaded_at=0.0), [], NOTHING, NOTHING, id="no worker has come"),
        pytest.param(stats(loaded_at=0.0), [rank(0)], NOTHING, NOTHING, id="workers that have not loaded yet"),
        pytest.param(
            stats(), [rank(7)], Unsaved(None, 7, 90.0), Unsaved(None, 7, 90.0), id="a fresh start without a save"
        ),
        pytest.param(
            stats(loaded_at=0.0),
            [rank(7)],
            Unsaved(None, 7, 100.0),
            Unsaved(None, 7, 100.0),
            id="a script that never loads",
        ),
        pytest.param(
            stats(memory=at(20), durable=at(10), begun={at(10): 150.0, at(20): 180.0}),
            [rank(25, 20, 20), rank(24, 20, 20)],
            Unsaved(at(20), 5, 20.0),
            Unsaved(at(10), 15, 50.0),
            id="a newer save in memory than on storage: the furthest rank counts",
        ),
        pytest.param(
            stats(memory=at(20), durable=at(20), begun={at(20): 180.0}),
            [rank(35, 30, 30)],
            Unsaved(at(20), 15, 20.0),
            Unsaved(at(20), 15, 20.0),
            id="the save of step 30 was skipped",
        ),
        pytest.param(
            stats(memory=at(20), begun={at(10): 150.0, at(20): 199.0}),
            [rank(20, 10, 10)],
            Unsaved(at(20), 0, 1.0),
            Unsaved(None, 20, 90.0),
            id="a save that is whole, and that its worker has not named yet",
        ),
        pytest.param(
            stats(memory=at(2), durable=at(1), begun={at(1): 120.0, at(2): 160.0}),
            [rank(250, 200, 2)],
            Unsaved(at(2), 50, 40.0),
            Unsaved(at(1), 150, 80.0),
            id="saves that are named by epochs of 100 steps",
        ),
        pytest.param(
            stats(loaded=OLD, durable=OLD),
            [rank(3, 0, 40, 40)],
            Unsaved(OLD, 3, 90.0),
            Unsaved(OLD, 3, 90.0),
            id="resumed from storage",
        ),
        pytest.param(
            stats(loaded=at(50, 1), memory=at(50, 1), durable=OLD),
            [rank(3, 0, 50, 50)],
            Unsaved(at(50, 1), 3, 90.0),
            Unsaved(OLD, 13, 90.0, at_least=True),
            id="resumed from memory of an earlier launch: that launch's steps count, its time is not known",
        ),
        pytest.param(
            stats(loaded=at(50), memory=at(50), durable=at(30), begun={at(30): 60.0, at(50): 80.0}),
            [rank(3, 0, 50, 50)],
            Unsaved(at(50), 3, 90.0),
            Unsaved(at(30), 23, 110.0),
            id="resumed from memory after a restart: the time before it counts",
        ),
        pytest.param(
            stats(loaded=OLD, durable=SaveId(1, 60)),
            [rank(3, 0, 40, 40)],
            Unsaved(SaveId(1, 60), 3, 90.0),
            Unsaved(SaveId(1, 60), 3, 90.0),
            id="resumed from an older one than there is",
        ),
        pytest.param(
            stats(memory=at(20), durable=at(20), begun={at(20): 90.0}, loaded_at=60.0),
            [rank(25, 20, 20, beat=95.0)],
            Unsaved(at(20), 0, 0.0),
            Unsaved(at(20), 0, 0.0),
            id="workers that died, whose successors have reported nothing yet",
        ),
        pytest.param(
            stats(durable=at(30), begun={at(30): 150.0}),
            [rank(35, 30, 30)],
            Unsaved(at(30), 5, 50.0),
            Unsaved(at(30), 5, 50.0),
            id="memory was lost, and storage has what it held",
        ),
    ],
)
def test_a_loss_costs_what_no_tier_has(known, ranks, worker, node):
    assert costs(known, *ranks) == (worker, node, None)


@pytest.mark.parametrize(
    ("remote", "cost"),
    [(None, Unsaved(None, 25, 90.0)), (at(10), Unsaved(at(10), 15, 50.0)), (at(20), Unsaved(at(20), 5, 20.0))],
)
def test_a_loss_of_the_directory_costs_what_the_remote_tier_lacks(remote, cost):
    known = stats(memory=at(20), durable=at(20), begun={at(10): 150.0, at(20): 180.0}, remote=remote)
    assert costs(known, rank(25, 20, 20))[2] == cost


def test_a_loss_of_the_node_costs_less_where_the_remote_tier_is_ahead_of_a_directory_that_was_lost():
    known = stats(durable=None, remote=at(10), begun={at(10): 150.0})
    assert costs(known, rank(12, 10, 10))[1] == Unsaved(at(10), 2, 50.0)


def test_each_directory_has_costs_of_its_own():
    first = stats(memory=at(20), begun={at(20): 180.0})
    second = SaverStats("/others", memory=at(5), begun={at(5): 199.0}, loaded_at=110.0)
    telemetry = {HERE: [rank(25, 20, 20)], "/others": [rank(6, 5, 5)]}
    found = unsaved_work([first, second], telemetry, NOW, STARTED)
    assert [(one.directory, one.worker) for one in found] == [
        (HERE, Unsaved(at(20), 5, 20.0)),
        ("/others", Unsaved(at(5), 1, 1.0)),
    ]


def test_a_job_with_many_saves_knows_about_when_an_old_one_was_made():
    known = SaverStats(HERE, loaded_at=0.5)
    for step in range(10 * TIMES):
        known.begin(at(step))
        known.begun[at(step)] = float(step)
    assert len(known.begun) <= TIMES
    known.memory, known.durable = at(10 * TIMES - 1), at(9 * TIMES + 1)
    now = 10.0 * TIMES
    (found,) = unsaved_work([known], {HERE: [rank(10 * TIMES, 10 * TIMES - 1, 10 * TIMES - 1, beat=now)]}, now)
    assert found.worker == Unsaved(known.memory, 1, 1.0)
    assert found.node.steps == TIMES - 1 and TIMES - 1 <= found.node.seconds < 2 * TIMES


@pytest.mark.parametrize(
    ("worker", "step"),
    [(rank(7), None), (rank(25, 20, 20), 25), (rank(3, 0, 40, 40), 43), (rank(250, 200, 2), 2), (rank(310, 200, 2), 3)],
)
def test_the_step_that_a_worker_has_reached_is_one_of_the_scripts(worker, step):
    assert reached(worker) == step
