"""One rank of benchmarks/fsdp_save.py: a GPT-2 with AdamW, sharded by FSDP2, saved in all ways by turns.

Each part is a job of its own; the first rank writes what all have measured to ``--out``: of each save the seconds until
the last rank went on, and until the last rank knew that it is durable.
"""

import argparse
import ctypes
import gc
import json
import os
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from benchmarks.fsdp_save_ways import BareFile, Saving, State, Stock, WarmCopy, Way, forget, our_writer, ours, tensors
from examples.gpt2.model import GPT, GPTConfig
from fastckpt.dcp import SharedMemoryWriter
from fastckpt.fsdp import FsdpShardCheckpointer, StorageType

warnings.filterwarnings("ignore")
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
COPY, COPY_BACK = "bare copy into warm memory", "bare copy out of warm memory"
WRITE, READ = "bare O_DIRECT write", "bare O_DIRECT read"
UNWAITED = "async_save, process, staged behind, nobody waits"
LIMITS = {COPY: "copy", COPY_BACK: "copy", WRITE: "write"}


class Training:
    """A GPT-2 of 12 layers and its AdamW, of about so many GB in all, each block a group of FSDP2."""

    def __init__(self, gigabytes: float) -> None:
        torch.manual_seed(0)
        width = max(1, round((gigabytes / 1.49) ** 0.5 * 12)) * 64
        self.model = GPT(GPTConfig(vocab_size=50257, n_layer=12, n_head=width // 64, n_embd=width, dropout=0.0))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step()

    @property
    def pair(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self.model, self.optimizer

    def backward(self) -> None:
        """Forward and backward of one short sequence."""
        self.model(torch.randint(50257, (1, 8))).float().logsumexp(-1).mean().backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prepare(self) -> None:
        """Have gradients without a backward, so that nothing is left to do before the optimizer's step."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    def change(self) -> None:
        """Write to all of the state, at once."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        """All of it, as DCP takes it."""
        return dict(zip(("model", "optimizer"), get_state_dict(*self.pair), strict=True))


class Bench:
    """Measures ways by turns; what all ranks have measured is in ``lines``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.training = Training(options.gigabytes)
        self.state = self.training.state()
        self._begun = time.monotonic()
        self._step = 0
        self._times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._limits: dict[str, float] = {}
        self._consistent: dict[str, bool] = {}

    @contextmanager
    def timed(self, name: str, turn: str, what: str) -> Iterator[None]:
        """Time what all ranks do at the same time."""
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        yield
        self._record(name, turn, **{what: time.perf_counter() - start})
        self._write()
        dist.barrier()

    def _record(self, name: str, turn: str, **seconds: float) -> None:
        """Keep what was measured, and beside it the limits as they were measured last."""
        if name in LIMITS:
            self._limits[LIMITS[name]] = seconds["blocked"]
        for what, value in (seconds | self._limits).items():
            self._times[name][f"{turn} {what}"].append(value)

    def rounds(self, work: Callable[[str], None]) -> None:
        """The first round, which counts apart; as many as asked for, if there is time; one that checks."""
        work("first")
        for done in range(self.options.repeats):
            if done == 0 or self.is_before(0.55):
                self._limits.clear()
                work("later")
        work("check")

    def asked(self, ways: list[Way]) -> list[Way]:
        """Return the ways that are to be measured."""
        words = self.options.ways
        return [way for way in ways if not words or any(word in way.name for word in words)]

    def is_before(self, part: float) -> bool:
        """Return whether less than this part of the time is over, by the first rank's clock."""
        said = torch.tensor(int(time.monotonic() < self._begun + part * self.options.seconds))
        dist.broadcast(said, 0)
        return bool(said)

    def _write(self) -> None:
        """Have the first rank write down what all have measured so far: whoever ends this job has that."""
        lines, size = self._lines(), torch.tensor(sum(tensor.nbytes for tensor in tensors(self.state)))
        dist.all_reduce(size)
        if dist.get_rank() == 0:
            about = {"bytes": int(size), "tensors": len(list(tensors(self.state))), "ranks": dist.get_world_size()}
            self.options.out.write_text(json.dumps({"about": about, "ways": lines}))

    def save(self, way: Way, turn: str, behind: Callable[[Saving], float] | None = None) -> None:
        """One save, timed unless it is to be checked."""
        if not self.is_before(0.85):
            return
        self._step += 1
        if turn != "check":
            self._time(way, turn, behind)
        elif way.load is not None:
            self._check(way, behind)
        dist.barrier()
        if dist.get_rank() == 0:
            way.remove(self._step)
            os.sync()
        self._write()
        dist.barrier()

    def _time(self, way: Way, turn: str, behind: Callable[[Saving], float] | None) -> None:
        way.ready()
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        saving = way.save(self._step)
        seconds = {"blocked": time.perf_counter() - start}
        if behind is not None:
            begun = time.perf_counter()
            seconds["blocked"] += behind(saving)
            seconds["step"] = time.perf_counter() - begun
        if saving.durable is not None:
            saving.durable()
            seconds["durable"] = time.perf_counter() - start
        self._record(way.name, turn, **seconds)

    def _check(self, way: Way, behind: Callable[[Saving], float] | None) -> None:
        """Check that the loaded state is the one at the save, though training went on at once."""
        assert way.load is not None
        want = self.digest()
        self.training.prepare()
        saving = way.save(self._step)
        if behind is None or not way.waits:
            self.training.change()
        else:
            behind(saving)
        if saving.durable is not None:
            saving.durable()
        dist.barrier()
        changed = self.digest() != want
        way.load(self._step, self.state)
        equal = torch.tensor(int(changed and self.digest() == want))
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        self._consistent[way.name] = bool(equal)

    def digest(self) -> str:
        """Return a digest of all bytes that this rank has."""
        digest = xxhash.xxh3_128()
        for tensor in tensors(self.state):
            if tensor.numel():
                digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        return digest.hexdigest()

    def _lines(self) -> list[dict[str, Any]]:
        """One for each way, with the slowest rank's seconds of each time."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {name: dict(times) for name, times in self._times.items()})

        def slowest(name: str, kind: str) -> list[float]:
            return [max(each) for each in zip(*(of[name][kind] for of in found), strict=True)]

        return [
            {"name": name, "consistent": self._consistent.get(name), **{kind: slowest(name, kind) for kind in kinds}}
            for name, kinds in found[0].items()
        ]


def waits(bench: Bench) -> None:
    """Ways in which training waits until the state is copied."""
    options, state, training = bench.options, bench.state, bench.training
    stock, folder = Stock(state, options.folder), bench.options.folder / "ours"
    kept, shared = stock.stager(shared=False), stock.stager(shared=True)
    copy = WarmCopy(state, max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    bare = BareFile(options.shm, options.folder, dist.get_rank())
    with FsdpShardCheckpointer(folder) as checkpointer, SharedMemoryWriter(options.folder / "writer") as writer:
        ways = [
            *ours(checkpointer, state, training.pair, folder),
            *our_writer(writer, state, options.folder / "writer"),
            stock.torch_save(),
            stock.save("dcp.save"),
            stock.save("dcp.save, cached plans", cached=True),
            stock.async_save("async_save, thread", THREAD),
            stock.async_save("async_save, thread, kept stager", THREAD, kept),
            stock.async_save("async_save, thread, kept stager, cached plans", THREAD, kept, cached=True),
            stock.async_save("async_save, process", PROCESS),
            stock.async_save("async_save, process, shared stager", PROCESS, shared),
            stock.async_save("async_save, process, shared stager, cached plans", PROCESS, shared, cached=True),
        ]

        def work(turn: str) -> None:
            for way in bench.asked(ways):
                if turn != "check":  # limits drift: each is measured before each way that is compared with it
                    bench.save(Way(COPY, copy.save), turn)
                    if "DISK" in way.name:
                        bench.save(Way(WRITE, bare.save, ready=bare.ready), turn)
                bench.save(way, turn)
            if turn != "check":
                with bench.timed("get_state_dict alone", turn, "blocked"):
                    training.state()

        bench.rounds(work)
        bare.remove()
    stock.close()


def behind(bench: Bench) -> None:
    """Ways in which the copy of the state overlaps with the next forward and backward."""
    options, state, training = bench.options, bench.state, bench.training
    stock, folder = Stock(state, options.folder), bench.options.folder / "ours"
    plain, shared = stock.stager(shared=False, behind=True), stock.stager(shared=True, behind=True)
    copy = WarmCopy(state, max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    with FsdpShardCheckpointer(folder, overlap=training.optimizer) as checkpointer:
        ways = [
            *(way for way in ours(checkpointer, state, training.pair, folder) if way.name != "ours, DISK, state dict"),
            stock.async_save("async_save, thread", THREAD),
            stock.async_save("async_save, thread, staged behind", THREAD, plain, cached=True),
            stock.async_save("async_save, process, staged behind", PROCESS, shared, cached=True),
            stock.async_save(UNWAITED, PROCESS, shared, cached=True, waits=False),
        ]

        def step(saving: Saving) -> float:
            """A step of training, which waits for the copy before its optimizer does."""
            before = checkpointer._writer.beats.stalled
            training.backward()
            start = time.perf_counter()
            saving.staged()
            waited = time.perf_counter() - start
            training.optimizer.step()
            training.optimizer.zero_grad()
            return waited + checkpointer._writer.beats.stalled - before

        def work(turn: str) -> None:
            for way in bench.asked(ways):
                if turn != "check":
                    bench.save(Way(COPY, copy.save), turn)
                    with bench.timed("a step without a save", turn, "step"):
                        step(Saving())
                bench.save(way, turn, step)

        bench.rounds(work)
    stock.close()


def loads(bench: Bench) -> None:
    """Loads of a state of the same sharding, into the model and its optimizer."""
    options, state, training = bench.options, bench.state, bench.training
    stock, theirs = Stock(state, options.folder), options.folder / "1"
    copy = WarmCopy(state, max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    bare = BareFile(options.shm, options.folder, dist.get_rank())
    with FsdpShardCheckpointer(options.folder / "ours") as checkpointer:
        copy.save(1)
        stock.save("").save(1)
        want = bench.digest()
        checkpointer.save_checkpoint(1, state, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint()
        for step in range(2, 6):  # every slot is used
            dist.barrier()
            if not (result := checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)):
                raise RuntimeError(result.reason)
        bare.ready()
        bare.save(1)
        dist.barrier()
        mine = options.folder / "ours" / "checkpoint-1"

        def ours_from(place: str, step: str) -> None:
            checkpointer.load_checkpoint(training.model, training.optimizer, step)
            if checkpointer.loaded_from != place:
                raise RuntimeError(f"loaded from {checkpointer.loaded_from}, not {place}")

        def ours_by_reader() -> None:
            reader = checkpointer.get_storage_reader()
            assert reader is not None
            dcp.load(bench.state, storage_reader=reader)

        ways: list[tuple[str, Callable[[], object], Path | None]] = [
            (COPY_BACK, copy.load, None),
            ("ours, memory, load_checkpoint", lambda: ours_from("memory", ""), None),
            ("ours, memory, dcp.load with our reader", ours_by_reader, None),
            (READ, bare.read, None),
            ("ours, storage, load_checkpoint", lambda: ours_from("storage", "1"), mine),
            ("dcp.load of our files", lambda: dcp.load(bench.state, checkpoint_id=mine), mine),
            ("dcp.load", lambda: dcp.load(bench.state, checkpoint_id=theirs), theirs),
            ("dcp.load, files in the page cache", lambda: dcp.load(bench.state, checkpoint_id=theirs), None),
        ]

        def work(turn: str) -> None:
            for name, load, folder in ways if turn != "check" else ():
                if not bench.is_before(0.85):
                    return
                training.prepare()
                training.change()
                bench.state = training.state()  # a load may give the optimizer other tensors
                copy.aim(bench.state)
                if folder is not None and dist.get_rank() == 0:
                    forget([path for path in folder.iterdir() if path.is_file()])
                with bench.timed(name, turn, "blocked"):
                    load()
                bench.state = training.state()
                if name != READ and bench.digest() != want:
                    raise RuntimeError(f"{name} gave another state")

        bench.rounds(work)
        bare.remove()


PARTS = {"waits": waits, "behind": behind, "loads": loads}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--gigabytes", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="that this part may take, about")
    parser.add_argument("--ways", nargs="*", default=[])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shm", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    try:
        measure(options)
    except BaseException:  # noqa: BLE001  # threads and groups that wait for each other would outlive it
        traceback.print_exc()
        os._exit(1)
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> None:
    PARTS[options.part](Bench(options))
    dist.barrier()


if __name__ == "__main__":
    main()
