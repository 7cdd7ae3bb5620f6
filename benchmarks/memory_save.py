"""What resumes cost, and saves beside their bytes, each beside its limit measured in the same run.

    python benchmarks/memory_save.py [--gigabytes 1.5] [--repeats 3]

Every figure comes from workers under a real `fastckpt-run`, restarted by real kills; a ratio of 1 is the limit.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def gpt2_with_adamw(gigabytes: float) -> dict[str, Any]:
    """A GPT-2 of 12 layers and its AdamW, of about that size, as state_dict() gives them: 593 tensors."""
    from examples.gpt2.model import GPT, GPTConfig

    width = max(1, round((gigabytes / 1.49) ** 0.5 * 12)) * 64
    model = GPT(GPTConfig(vocab_size=50257, n_layer=12, n_head=width // 64, n_embd=width))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}


def many_tensors(count: int) -> dict[str, Any]:
    """A model and AdamW of ``count`` small tensors."""
    parameters = [torch.nn.Parameter(torch.randn(64)) for _ in range(count // 4)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model = {f"layer{i}.weight": parameter.detach() for i, parameter in enumerate(parameters)}
    return {"model": model, "optimizer": optimizer.state_dict(), "step": 0}


def tensors(node: Any) -> list[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [tensor for child in children for tensor in tensors(child)]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def worker_resumes(out: Path, gigabytes: float, repeats: int) -> None:
    """Save once; then each restart measures either a resume or a copy of the same tensors into fresh memory."""
    from fastckpt import DdpCheckpointer, StorageType

    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpointer = DdpCheckpointer(out.parent / "checkpoints")
    if restart == 0:
        checkpointer.save_checkpoint(0, gpt2_with_adamw(gigabytes), storage_type=StorageType.MEMORY)
        os.kill(os.getpid(), signal.SIGKILL)
    if restart % 2:
        held: list[Any] = []
        record(out, resume=seconds(lambda: held.append(checkpointer.load_checkpoint())))
    else:
        (image,) = {path for path in Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-0/model.pt")}
        sources = tensors(torch.load(image, mmap=True))
        torch.set_num_threads(os.cpu_count() or 1)
        record(out, fresh=seconds(lambda: held_copies.extend(torch.empty_like(s).copy_(s) for s in sources)))
    if restart < 2 * repeats:
        os.kill(os.getpid(), signal.SIGKILL)


held_copies: list[torch.Tensor] = []


def worker_counts(out: Path, repeats: int) -> None:
    """What a save costs beside its fill, by number of tensors."""
    from fastckpt import DdpCheckpointer, StorageType
    from fastckpt._core.transfer.host_copy import HostCopy

    fill, filling = HostCopy.fill, [0.0]

    def timed(self: HostCopy, copies: Any) -> None:
        filling[0] = seconds(lambda: fill(self, copies))

    HostCopy.fill = timed  # type: ignore[method-assign]
    for count in (450, 2000, 10000):
        state = many_tensors(count)
        with DdpCheckpointer(out.parent / f"checkpoints-{count}") as checkpointer:
            first = seconds(lambda c=checkpointer, s=state: c.save_checkpoint(0, s, storage_type=StorageType.MEMORY))
            costs = []
            for step in range(1, 6 + repeats):
                state["step"] = step
                whole = seconds(
                    lambda c=checkpointer, s=state, i=step: c.save_checkpoint(i, s, storage_type=StorageType.MEMORY)
                )
                costs.append(whole - filling[0])
            record(out, count=count, first=first, repeated=costs[5:])


def record(out: Path, **values: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps(values) + "\n")


def launch(what: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run one kind of worker under fastckpt-run; what it recorded, and the events."""
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastckpt-bench-"))
    folder.mkdir()
    out, events = folder / "out", folder / "events"
    command = [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc_per_node=1", "--max-restarts=100"]
    command += ["--fast-max-stalls=0"]  # those that measure resumes take no steps
    command += ["--fast-events", str(events), __file__, "--worker", what, "--out", str(out)]
    command += ["--gigabytes", str(options.gigabytes), "--repeats", str(options.repeats)]
    environment = os.environ | {"FASTCKPT_SHM_DIR": str(shm), "PYTHONPATH": str(Path(__file__).parent.parent)}
    try:
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        lines = [*out.read_text().splitlines(), *events.read_text().splitlines()]
        return [json.loads(line) for line in lines]
    finally:
        shutil.rmtree(shm)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def values(records: list[dict[str, Any]], key: str) -> list[float]:
    found = [record[key] for record in records if key in record]
    return [v for value in found for v in (value if isinstance(value, list) else [value])]


def row(name: str, ours: list[float], limit: list[float], goal: str) -> None:
    a, b = statistics.median(ours), statistics.median(limit)
    print(f"| {name} | {a:.3f} ({min(ours):.3f}-{max(ours):.3f}) | {b:.3f} ({min(limit):.3f}-{max(limit):.3f}) "
          f"| **{a / b:.2f}** | {goal} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    size, repeats = options.gigabytes, options.repeats
    if options.worker:
        {
            "resumes": lambda: worker_resumes(options.out, size, repeats),
            "counts": lambda: worker_counts(options.out, repeats),
        }[options.worker]()
        return
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        report(options, Path(name))


def report(options: argparse.Namespace, folder: Path) -> None:
    print(f"GPT-2 with AdamW of {options.gigabytes:g} GB; seconds, median (range)\n")
    print("| what | ours | limit | ratio | goal |\n| --- | --- | --- | --- | --- |")
    resumes = launch("resumes", options, folder / "resumes")
    row("resume : copy into fresh memory", values(resumes, "resume"), values(resumes, "fresh"), "1.3")
    print("\n| tensors | first save, ms | repeated save beside its fill, ms | per 1,000 tensors | goal |")
    print("| --- | --- | --- | --- | --- |")
    for record in launch("counts", options, folder / "counts"):
        if "count" in record:
            repeated = 1e3 * statistics.median(record["repeated"])
            print(f"| {record['count']:,} | {1e3 * record['first']:.0f} | {repeated:.2f} "
                  f"| **{1e3 * repeated / record['count']:.2f}** | 2 |")  # fmt: skip


if __name__ == "__main__":
    main()
