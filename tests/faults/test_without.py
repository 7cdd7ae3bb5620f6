"""The same script without the memory of one agent alone: on two nodes."""

from fastckpt._core.storage.local.directory import CheckpointDirectory
from tests.faults.faults import kill
from tests.faults.jobs import HERE, assert_as_if_nothing_had_happened
from tests.support.ports import free_port


def names(stored):
    return {path.name for path in stored.place.iterdir()}


def test_two_nodes_train_and_resume_when_one_agent_has_no_memory(new_job, uninterrupted):
    shape = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "two")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    first = new_job().with_faults(kill(rank=1, at="snapshot.fill", step=46))
    second = new_job()
    second.faults, second.output = first.faults, first.folder / "output-2"
    for job in (first, second):
        job.start("--wait", launcher=(str(HERE / "launch.py"), str(first.folder), *shape, *rendezvous))
    assert [first.wait(), second.wait()] == [0, 0], first.text() + second.text()
    assert first.injected() == 1
    # Where node 1 had not learnt yet that node 0 has 44, its save of step 46 was written over its own 44.
    assert first.resumes(0)[1] == first.resumes(1)[1] and first.resumes(0)[1] in [(42, "memory"), (44, "memory")]
    assert_as_if_nothing_had_happened(first, uninterrupted())
    storage = CheckpointDirectory(first.checkpoint_dir)
    assert all({"model.pt", "rank_0.pt", "rank_1.pt"} <= names(stored) for stored in storage.checkpoints())
    assert storage.scan().gathered == [] and storage.scan().damaged == []
