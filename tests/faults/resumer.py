"""A rank that resumes from whatever directory it is told to, again and again: one start of torch for many faults.

Requests and answers are lines of JSON on stdin and stdout. A request is {directory, verify, over, spare, patience}:
``over`` maps paths to files that this rank alone sees in their place, ``spare`` limits to what it has left of each
while it loads; ``patience`` is how many seconds it tries again. The answer is {step, tier, state, own, counts, log} or
{error, log}.
"""

import contextlib
import io
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastckpt._core import metrics
from fastckpt._core.resume import survey
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import FastckptError
from tests.faults.diary import digest


@contextlib.contextmanager
def short_of(spare: dict[str, int]) -> Iterator[None]:
    """With so many more descriptors ("NOFILE"), or bytes of memory ("AS"), than this process has now."""
    held = os.open("/dev/null", os.O_RDONLY)
    filled = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]  # numbers below the limit that are free
    used = {"NOFILE": max(filled) + 1, "AS": int(Path("/proc/self/statm").read_text().split()[0]) * 4096}
    names = {name: getattr(resource, f"RLIMIT_{name}") for name in spare}
    before = {name: resource.getrlimit(number) for name, number in names.items()}
    for name, number in names.items():
        resource.setrlimit(number, (used[name] + spare[name], before[name][1]))
    try:
        yield
    finally:
        for name, number in names.items():
            resource.setrlimit(number, before[name])
        for descriptor in (held, *filled):
            os.close(descriptor)


def resume(request: dict[str, Any]) -> dict[str, Any]:
    metrics.counts.clear()
    survey.LIMIT, survey.PAUSE = request["patience"], request["patience"] / 4
    checkpointer = DdpCheckpointer(request["directory"], verify=request["verify"])
    try:
        with short_of(request["spare"]):
            state = checkpointer.load_checkpoint()
        return {
            "step": checkpointer.loaded_step,
            "tier": checkpointer.loaded_from,
            "state": digest(state),
            "own": digest(dict(checkpointer.rank_state)),
            "bad": metrics.counts["bad_checkpoints"],
        }
    except FastckptError as error:
        return {"error": f"{type(error).__name__}: {error}", "cause": type(error.__cause__).__name__}
    finally:
        for rank in (1, 0):  # the first rank goes last, since the saver is its own
            if dist.get_rank() == rank:
                checkpointer.close()
            dist.barrier()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
    log = io.StringIO()
    logging.basicConfig(stream=log, level=logging.INFO)
    for line in sys.stdin:
        request = json.loads(line)
        for path, other in request["over"].items():
            subprocess.run(["mount", "--bind", other, path], check=True)
        answer = resume(request)
        for path in request["over"]:
            subprocess.run(["umount", "--lazy", path], check=False)  # it may have been moved away
        print(json.dumps({**answer, "log": log.getvalue()}), file=answers, flush=True)
        log.truncate(0)
        log.seek(0)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
