"""Three lines at the end of a job: what a user must know is in them, and they stay three lines."""

import logging
from collections import Counter

from fastckpt._core.config import Settings
from fastckpt._core.format.ids import SaveId
from fastckpt._core.saver.stats import Copies, ReplicaCounts, SaverStats
from fastckpt_run.events.summary import log_course

SAVED, OLD = SaveId(1, 9), SaveId(1, 7)


def stats(directory: str = "/run", **counts) -> SaverStats:
    return SaverStats(directory, **{"saves": 3, "wanted": SAVED, "durable": SAVED} | counts)


LATE = {"durable": OLD, "failures": 3, "last_failure": "[Errno 28] No space\nleft on device"}
TROUBLES = [
    ({}, "in /run step 9 of history 1 is durable"),
    (
        LATE,
        "durable, 3 persists failed: [Errno 28] No space left on device, step 9 of history 1 is NOT durable",
    ),
    ({"asked": {(OLD, "")}}, "1 checkpoint missed that should have been persisted"),
    ({"skips": Counter({"step 8 waits": 2, "there is no room": 500})}, "502 saves skipped, as there is no room"),
    ({"remote": Copies("s3://b", newest=OLD, failures=7)}, "it is NOT in s3://b, 7 uploads"),
    ({"replicas": ReplicaCounts(skipped=4)}, "NO save in memory is safe from the loss of this host"),
    ({"durable": None}, "NOTHING is durable: 3 checkpoints came to be whole in memory, and no further"),
    ({"durable": None, "failures": 2, "last_failure": "x" * 999}, "2 persists failed"),
]


def test_each_trouble_of_a_directory_is_in_its_line_and_it_is_named_though_there_are_many(caplog):
    caplog.set_level(logging.INFO, "fastckpt.report")
    every = [stats(f"/run/{number}") for number in range(5)] + [stats("/run/5", durable=None)]
    for all_stats, text in [*(([stats(**counts)], text) for counts, text in TROUBLES), (every, "in /run/5 NOTHING is")]:
        log_course([], all_stats, Settings())
        states, more = caplog.messages[-1].split("\n")[-2:]
        assert text in states and len(states) < 400
        assert more == "  more: --fast-summary full"
    assert states.endswith("and 1 directory more")
