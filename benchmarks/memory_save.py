"""What saves to memory and persists cost, each beside its limit measured in the same run.

    python benchmarks/memory_save.py [--gigabytes 1.5] [--repeats 3]

Every figure comes from workers under a real `fastckpt-run`, restarted by real kills; a ratio of 1 is the limit.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BLOCK = 32 << 20


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


def unique_bytes(state: Any) -> dict[int, torch.Tensor]:
    """One tensor over each storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors(state)}
    return {key: torch.empty(0, dtype=torch.uint8).set_(storage) for key, storage in storages.items()}


def warm_copy(state: Any, repeats: int) -> list[float]:
    """Copy the same tensors into shared memory that is faulted in: a loop of Tensor.copy_ on all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    sources = list(unique_bytes(state).values())
    total = sum(source.numel() for source in sources)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(total)
        memory = mmap.mmap(file.fileno(), total, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        targets = whole.split([source.numel() for source in sources])

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        copy()
        return [seconds(copy) for _ in range(repeats)]


def worker_saves(out: Path, gigabytes: float, repeats: int, prepared: bool) -> None:
    """The first save, later ones beside warm copies, and persists."""
    from fastckpt import DdpCheckpointer, StorageType

    state = gpt2_with_adamw(gigabytes)
    with DdpCheckpointer(out.parent / "checkpoints") as checkpointer:
        if prepared:
            checkpointer.prepare(state)
            time.sleep(8 * gigabytes + 2)
        first = seconds(lambda: checkpointer.save_checkpoint(0, state, storage_type=StorageType.MEMORY))
        time.sleep(3 * gigabytes)
        for step in range(1, 4):
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)  # every slot is used once
        later, copies = [], []
        for step in range(4, 4 + 3 * repeats):
            later.append(
                seconds(lambda step=step: checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY))
            )
            copies += warm_copy(state, 1)
            torch.set_num_threads(1)
        saved = sum(t.numel() for t in unique_bytes(state).values())
        record(out, first=first, later=later, copy=copies, bytes=saved, tensors=len(tensors(state)))
        if not prepared:
            for step in range(100, 100 + repeats):
                checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK)
                checkpointer.wait_latest_checkpoint()
                (image, *_) = Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*/model.pt")
                record(out, bare=bare_write(image, out.parent / "bare"))


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


def bare_write(image: Path, path: Path) -> float:
    """Write an image's bytes from its mapping with O_DIRECT and fdatasync, and nothing else."""
    size = image.stat().st_size
    source = os.open(image, os.O_RDONLY)
    memory = memoryview(mmap.mmap(source, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)

    def write() -> None:
        for offset in range(0, size, BLOCK):
            os.pwrite(fd, memory[offset : offset + BLOCK], offset)
        os.fdatasync(fd)

    try:
        return seconds(write)
    finally:
        os.close(source)
        os.close(fd)
        path.unlink()


def record(out: Path, **values: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps(values) + "\n")


def launch(what: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run one kind of worker under fastckpt-run; what it recorded, and the events."""
    shm = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fastckpt-bench-"))
    folder.mkdir()
    out, events = folder / "out", folder / "events"
    command = [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc_per_node=1", "--max-restarts=100"]
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
            "saves": lambda: worker_saves(options.out, size, repeats, prepared=False),
            "prepared": lambda: worker_saves(options.out, size, repeats, prepared=True),
            "counts": lambda: worker_counts(options.out, repeats),
        }[options.worker]()
        return
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as name:
        report(options, Path(name))


def report(options: argparse.Namespace, folder: Path) -> None:
    saves = launch("saves", options, folder / "saves")
    size, count = values(saves, "bytes")[0], values(saves, "tensors")[0]
    print(f"GPT-2 with AdamW: {size / 1e9:.2f} GB, {count:.0f} tensors; seconds, median (range)\n")
    print("| what | ours | limit | ratio | goal |\n| --- | --- | --- | --- | --- |")
    row("later save : warm copy", values(saves, "later"), values(saves, "copy"), "1.2")
    prepared = launch("prepared", options, folder / "prepared")
    row("first save, prepared : warm copy", values(prepared, "first"), values(prepared, "copy"), "2")
    row("first save, not prepared : warm copy", values(saves, "first"), values(saves, "copy"), "-")
    persists = [record["seconds"] for record in saves if record.get("event") == "persisted"]
    row("bare O_DIRECT write of the same memory : persist", values(saves, "bare"), persists, "0.9 or more")
    print("\n| tensors | first save, ms | repeated save beside its fill, ms | per 1,000 tensors | goal |")
    print("| --- | --- | --- | --- | --- |")
    for record in launch("counts", options, folder / "counts"):
        if "count" in record:
            repeated = 1e3 * statistics.median(record["repeated"])
            print(f"| {record['count']:,} | {1e3 * record['first']:.0f} | {repeated:.2f} "
                  f"| **{1e3 * repeated / record['count']:.2f}** | 2 |")  # fmt: skip


if __name__ == "__main__":
    main()
