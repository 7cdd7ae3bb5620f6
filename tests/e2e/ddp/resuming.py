"""A job that resumes from storage, and how often its ranks call the file system of the checkpoint directory meanwhile.

As a program, a worker: ``resuming.py FOLDER STEPS`` saves so many steps, or counts the calls of its resume if it is 0.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist

from fastckpt.ddp import DdpCheckpointer, StorageType
from tests.faults.jobs import launcher_for
from tests.support import launchers
from tests.support.counting_calls import FileCalls
from tests.support.live_folders import remove_live
from tests.support.ports import free_port

DEADLINE = 240.0
CHECKPOINTS = 4


@dataclass(frozen=True)
class Calls:
    """The calls of a resume below the checkpoint directory.

    Attributes:
        of_rank: How many each rank made.
        manifests: How many manifests of checkpoints each rank opened.
    """

    of_rank: list[int]
    manifests: list[int]


def calls_of_a_resume(folder: Path, nodes: int, ranks: int) -> Calls:
    """Save some checkpoints on ``nodes`` nodes of so many ranks each, lose all memory, and resume.

    Each launch has memory of its own in FASTCKPT_SHM_DIR, so that the second finds nothing there.
    """
    for launch, steps in enumerate((CHECKPOINTS, 0)):
        _launch(folder, launch, nodes, ranks, steps)
    found = [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(nodes * ranks)]
    return Calls([each["all"] for each in found], [each["manifests"] for each in found])


def _launch(folder: Path, launch: int, nodes: int, ranks: int, steps: int) -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", str(launch))
    shape = ("--nnodes", str(nodes), "--nproc-per-node", str(ranks))
    agents, outputs, memories = [], [], []
    for node in range(nodes):
        memory = Path(os.environ["FASTCKPT_SHM_DIR"]) / f"{launch}-{node}"
        memory.mkdir(mode=0o700)
        memories.append(memory)
        variables = os.environ | {"FASTCKPT_SHM_DIR": str(memory), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        variables["FASTCKPT_PRELOAD"] = "auto"
        variables.setdefault("PYTHONPATH", str(Path(__file__).parents[3]))
        host = ("--local-addr", f"127.0.0.{node + 1}", "--rdzv-conf", f"is_host={int(node == 0)}")
        command = [*launcher_for(folder), *shape, *meeting, *host, __file__, str(folder), str(steps)]
        outputs.append(folder / f"output-{launch}-{node}")
        with outputs[-1].open("wb") as output:
            agents.append(launchers.start(command, variables, output.fileno()))
    try:
        codes = [agent.wait(DEADLINE) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for memory in memories:
            remove_live(memory)
    assert codes == [0] * nodes, "\n".join(each.read_text(errors="replace") for each in outputs)


def main() -> None:
    """Save, or resume and write down the calls."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), folder / "checkpoints"
    calls = FileCalls(directory)
    checkpointer = DdpCheckpointer(directory)
    for step in range(1, steps + 1):
        state = {"model": torch.full((100,), float(step))} if int(os.environ["LOCAL_RANK"]) == 0 else {}
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK, rank_state={"position": step})
        checkpointer.wait_latest_checkpoint(120)
    if not steps:
        assert checkpointer.load_checkpoint()["model"][0] == CHECKPOINTS and checkpointer.loaded_from == "storage"
        calls.stop()
        opened = [(Path(path), count) for (kind, path), count in calls.made.items() if kind == "open"]
        manifests = sum(count for path, count in opened if path.match("checkpoint-*/manifest.json"))
        kinds: Counter[str] = Counter()
        for (kind, path), count in calls.made.items():
            kinds[f"{kind} {Path(path).relative_to(directory)}"] += count
        found = {"all": calls.made.total(), "manifests": manifests, "kinds": kinds}
        (folder / f"calls-{rank}.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
