"""Hosts that are left out: those that fail alone, for causes of their own."""

from fastckpt._core.policy.hosts.host_exclusion import cause_of_host, suspects, with_faults
from tests.support.tables import for_each

COMPUTED = " has computed what its replicas have not"


@for_each(
    (-9, "", "signal 9"),
    (-7, "RuntimeError: a traceback before the signal", "signal 7"),
    (-6, "", ""),
    (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", None),
    (1, "ConnectionRefusedError: [Errno 111] Connection refused", ""),
    (1, "torch.distributed.DistBackendError: NCCL error: remote process exited", ""),
    (1, f"ReplicasDiffer: another rank (rank # on b){COMPUTED}", ""),
    (1, f"ReplicasDiffer: another rank or this one{COMPUTED}", ""),
    (1, f"ReplicasDiffer: this rank (rank # on b){COMPUTED}", None),
)
def test_the_cause_of_a_worker_that_missed_another_one_is_not_its_hosts(exitcode, exception, cause):
    assert cause_of_host(exitcode, exception) == (exception if cause is None else cause)


def test_causes_that_differ_in_numbers_only_are_one():
    texts = [f"OSError: [Errno 5] rank {rank} at 0x7f{rank}e0" for rank in (3, 12)]
    assert len({cause_of_host(1, text) for text in texts}) == 1


def test_a_host_that_failed_twice_alone_is_suspected_and_one_that_failed_once_is_not():
    faults = with_faults({}, [("a", "x"), ("b", "y"), ("a", "z")])
    assert suspects(faults, 2) == {"a"}
    assert suspects(faults, 1) == {"a", "b"}
    assert suspects(faults, 3) == suspects(faults, 0) == frozenset()


def test_a_cause_that_another_host_shares_counts_against_none():
    faults = with_faults({}, [("a", "x"), ("a", "x"), ("b", "x")])
    assert suspects(faults, 1) == frozenset()
    assert suspects(with_faults(faults, [("a", "y")]), 1) == {"a"}
