"""Which differences keep a node out of a job: a pure function, as a table."""

from dataclasses import replace

from fastckpt_run.rendezvous.job_terms import UNKNOWN, JobTerms, common, misfit

JOB = JobTerms("0.5.0", "2.13.0", "1", "2:3", "train.py")


MISFITS = [
    ({"version": "0.4.9"}, False, "fastckpt 0.4.9, and the nodes of the job 0.5.0: install fastckpt"),
    ({"version": "0.5.0rc1"}, False, "this node runs fastckpt 0.5.0rc1"),
    ({"version": "0.10.0"}, True, "fastckpt 0.10.0, and the nodes of the job 0.5.0: it waits until none of these"),
    ({"version": "a fork"}, True, "this node runs fastckpt a fork"),
    ({"torch": "2.12.1"}, False, "runs torch 2.12.1, and the nodes of the job 2.13.0: install torch 2.13.0 here"),
    ({"torch": "2.14.1"}, True, "runs torch 2.14.1, and the nodes of the job 2.13.0: it waits until none of these"),
    ({"version": "0.5.1", "torch": "2.12.1"}, True, "this node runs fastckpt 0.5.1"),
    ({"version": "0.5.1", "replicas": "2"}, True, "this node runs fastckpt 0.5.1"),
    ({"replicas": "xor:4"}, False, "--fast-replicas is xor:4 on this node, and 1 on the nodes of the job that it"),
    ({"nodes": "4"}, False, "--nnodes is 4 on this node, and 2:3 on the nodes of the job"),
    ({"script": "other.py"}, False, "the script is other.py on this node, and train.py on the nodes of the job"),
]


def test_a_node_that_differs_in_what_all_have_alike_does_not_fit_and_one_with_a_newer_version_waits():
    for other, waits, text in MISFITS:
        found = misfit(replace(JOB, **other), JOB)
        assert found is not None and found.waits == waits and text in found.text
        assert ("FC-034" if {"version", "torch"} & other.keys() else "FC-050") in found.text
    assert misfit(JOB, JOB) is misfit(JOB, UNKNOWN) is misfit(UNKNOWN, JOB) is None
    assert misfit(JOB, replace(UNKNOWN, torch=JOB.torch)) is None
    assert common([JOB]) == common([JOB, JOB]) == JOB
    assert common([JOB, replace(JOB, torch="2.14.1"), JOB]) == replace(JOB, torch="")
    assert common([JOB, UNKNOWN]) == common([]) == UNKNOWN
