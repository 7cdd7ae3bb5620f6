"""The work that a loss would cost, in all states of a job: a table of what the saver knows and what follows."""

from fastckpt._core.format.ids import SaveId
from fastckpt._core.memory.telemetry import Telemetry
from fastckpt._core.saver.stats import TIMES, Copies, SaverStats
from fastckpt_run.watch.unsaved_work import Unsaved, reached, unsaved_work

HERE = "/checkpoints"
STARTED, NOW = 100.0, 200.0
OLD = SaveId(1, 40)
"""Save of an earlier launch."""


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


def work(save, steps, seconds, **more):
    return Unsaved(save, steps, seconds, **more)


BEGUN = {at(10): 150.0, at(20): 180.0}
CASES = {
    "a fresh start without a save": (stats(), [rank(7)], work(None, 7, 90.0)),
    "a script that never loads": (stats(loaded_at=0.0), [rank(7)], work(None, 7, 100.0)),
    "a newer save in memory than on storage: the furthest rank counts": (
        stats(memory=at(20), durable=at(10), begun=BEGUN),
        [rank(25, 20, 20), rank(24, 20, 20)],
        work(at(20), 5, 20.0),
        work(at(10), 15, 50.0),
    ),
    "a save that is whole, and that its worker has not named yet": (
        stats(memory=at(20), begun={at(10): 150.0, at(20): 199.0}),
        [rank(20, 10, 10)],
        work(at(20), 0, 1.0),
        work(None, 20, 90.0),
    ),
    "saves that are named by epochs of 100 steps": (
        stats(memory=at(2), durable=at(1), begun={at(1): 120.0, at(2): 160.0}),
        [rank(250, 200, 2)],
        work(at(2), 50, 40.0),
        work(at(1), 150, 80.0),
    ),
    "resumed from storage": (stats(loaded=OLD, durable=OLD), [rank(3, 0, 40, 40)], work(OLD, 3, 90.0)),
    "resumed from memory of an earlier launch: that launch's steps count, its time is not known": (
        stats(loaded=at(50, 1), memory=at(50, 1), durable=OLD),
        [rank(3, 0, 50, 50)],
        work(at(50, 1), 3, 90.0),
        work(OLD, 13, 90.0, at_least=True),
    ),
    "resumed from memory after a restart: the time before it counts": (
        stats(loaded=at(50), memory=at(50), durable=at(30), begun={at(30): 60.0, at(50): 80.0}),
        [rank(3, 0, 50, 50)],
        work(at(50), 3, 90.0),
        work(at(30), 23, 110.0),
    ),
    "workers that died, whose successors have reported nothing yet": (
        stats(memory=at(20), durable=at(20), begun={at(20): 90.0}, loaded_at=60.0),
        [rank(25, 20, 20, beat=95.0)],
        work(at(20), 0, 0.0),
    ),
}


def test_a_loss_costs_what_no_tier_has_and_one_of_the_directory_what_the_remote_tier_lacks():
    for case, (known, ranks, worker, *node) in CASES.items():
        assert costs(known, *ranks) == (worker, node[0] if node else worker, None), case
    for cost in (work(None, 25, 90.0), work(at(10), 15, 50.0), work(at(20), 5, 20.0)):
        known = stats(memory=at(20), durable=at(20), begun=BEGUN, remote=cost.save)
        assert costs(known, rank(25, 20, 20))[2] == cost
    # Of the node: less where the remote tier is ahead of a directory that was lost.
    known = stats(durable=None, remote=at(10), begun={at(10): 150.0})
    assert costs(known, rank(12, 10, 10))[1] == Unsaved(at(10), 2, 50.0)


def test_a_job_with_many_saves_knows_about_when_an_old_one_was_made():
    known = SaverStats(HERE, loaded_at=0.5)
    for step in range(10 * TIMES):
        known.begin(at(step))
        known.begun[at(step)] = float(step)
    assert len(known.begun) <= TIMES
    known.memory, known.durable = at(10 * TIMES - 1), at(9 * TIMES + 1)
    now = 10.0 * TIMES
    second = SaverStats("/others", memory=at(5), begun={at(5): now - 1.0}, loaded_at=110.0)
    ranks = {HERE: [rank(10 * TIMES, 10 * TIMES - 1, 10 * TIMES - 1, beat=now)], "/others": [rank(6, 5, 5, beat=now)]}
    found, other = unsaved_work([known, second], ranks, now)
    assert found.worker == Unsaved(known.memory, 1, 1.0)
    assert found.node.steps == TIMES - 1 and TIMES - 1 <= found.node.seconds < 2 * TIMES
    assert (other.directory, other.worker) == ("/others", Unsaved(at(5), 1, 1.0))


def test_the_step_that_a_worker_has_reached_is_one_of_the_scripts():
    workers = [rank(7), rank(25, 20, 20), rank(3, 0, 40, 40), rank(250, 200, 2), rank(310, 200, 2)]
    assert [*map(reached, workers)] == [None, 25, 43, 2, 3]
