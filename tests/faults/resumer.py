"""A rank that resumes from whatever directory it is told to, again and again: one start of torch for many faults.

Requests and answers are lines of JSON on stdin and stdout. A request is {directory, over}: ``over`` maps paths to files
that this rank alone sees in their place. The answer is {step, state, own, log} or {error, log}.
"""

import io
import json
import logging
import os
import subprocess
import sys
from typing import Any

import torch.distributed as dist

from fastckpt._core.resume import survey
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import FastckptError
from tests.faults.diary import digest


def resume(request: dict[str, Any]) -> dict[str, Any]:
    survey.LIMIT, survey.PAUSE = 0.4, 0.1
    checkpointer = DdpCheckpointer(request["directory"])
    try:
        state = checkpointer.load_checkpoint()
        return {
            "step": checkpointer.loaded_step,
            "state": digest(state),
            "own": digest(dict(checkpointer.rank_state)),
        }
    except FastckptError as error:
        return {"error": f"{type(error).__name__}: {error}"}
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
