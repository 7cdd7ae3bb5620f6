"""Thousands of saves in one job whose clocks are set while it runs; ``--launch`` makes this process its agent.

Each rank appends a line of JSON to ``<out>/endured.<rank>`` now and then: what it and its agent hold.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from fastckpt._core import metrics

JUMPS = ((0.4, 3600.0), (0.7, -3600.0))
"""After which part of all saves the clock is set, to how many seconds off the right time."""
_right_time = time.time


def set_clock(part: float) -> None:
    """Let ``time.time`` tell what a clock would that was set."""
    off = [seconds for when, seconds in JUMPS if part >= when]
    shift = off[-1] if off else 0.0
    time.time = lambda: _right_time() + shift


def held(pid: int) -> dict[str, int]:
    """What a process holds: descriptors, mappings, and bytes of memory that are its own."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "mappings": len((process / "maps").read_text().splitlines()),
        "memory": int(status["RssAnon"].split()[0]) << 10,
        "threads": int(status["Threads"]),
    }


def launch(saves: int, arguments: list[str]) -> None:
    from fastckpt_run.main import main

    def jump(phase: str, fields: dict[str, Any]) -> None:
        if phase == "persist.manifest":
            set_clock(fields["step"] / saves)

    metrics.observe(jump)
    main(arguments)


def train(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from fastckpt._core.ipc.channel import Channel, pack
    from fastckpt.ddp import DdpCheckpointer, KeepTimeIntervalStrategy, StorageType

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sent = {"messages": 0, "sent": 0}
    send = Channel.send

    def count(self: Channel, message: Any) -> None:
        sent["messages"] += 1
        sent["sent"] += len(pack(message))
        send(self, message)

    Channel.send = count  # type: ignore[method-assign]
    directory = arguments.out / "checkpoints"
    checkpointer = DdpCheckpointer(directory, KeepTimeIntervalStrategy(30, str(directory)))
    assert checkpointer.load_checkpoint() == {}
    state = {"weights": torch.zeros(1000), "step": 0}
    skipped = 0
    with (arguments.out / f"endured.{rank}").open("w") as log:
        for step in range(1, arguments.saves + 1):
            set_clock(step / arguments.saves)
            state["weights"] += 1
            state["step"] = step
            place = StorageType.MEMORY if step % (arguments.saves // 20) else StorageType.DISK
            result = checkpointer.save_checkpoint(step, state, storage_type=place, metrics={"loss": 1 / step})
            skipped = result.skipped
            if not result.saved:
                time.sleep(0.02)  # let a slow disk catch up
            if step % (arguments.saves // 10) == 0:
                line = {"step": step, **sent, "skipped": skipped, "own": held(os.getpid()), "agent": held(os.getppid())}
                log.write(json.dumps(line) + "\n")
                sent.update(messages=0, sent=0)
            dist.barrier()
        final = checkpointer.wait_latest_checkpoint(300)
        newest = checkpointer.load_checkpoint()["step"]
        log.write(json.dumps({"end": newest, "durable": final, "tier": checkpointer.loaded_from}) + "\n")
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.launch:
        script = [__file__, *(argument for argument in sys.argv[1:] if argument != "--launch")]
        launch(
            arguments.saves, ["--standalone", "--nproc-per-node=2", f"--fast-events={arguments.out}/events", *script]
        )
    else:
        train(arguments)


if __name__ == "__main__":
    main()
