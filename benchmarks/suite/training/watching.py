"""The watching of a job: all of it beside none of it; and the hooks that see when ranks arrive at collectives."""

import socket
import statistics
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._processes import agent, processor_seconds

RANKS = 2
WARM, STEPS = 50, 400
"""Steps before those that count, and those."""
HOOKED = 20.0
"""Seconds of blocks with and without hooks by turns."""


def train(turn: Turn, port: int) -> None:
    """The worker: a model in DDP, saved to memory each 50 steps; rank 0 is scraped if there is a port."""
    from fastckpt import Checkpointer, metrics

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model, batch = DistributedDataParallel(nn.Sequential(*layers)), torch.randn(16, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ends = threading.Event()
    reader = threading.Thread(target=scrape, args=(port, ends))
    if port and dist.get_rank() == 0:
        reader.start()
    every, times = {"memory": 50, "storage": 10**6}, list[float]()
    with Checkpointer(turn.folder / "run", model=model, optimizer=optimizer, every=every) as checkpointer:
        checkpointer.resume()
        for step in range(1, WARM + (STEPS // 4 if turn.is_quick else STEPS) + 1):
            if step == WARM:
                begun, of_agent = time.monotonic(), processor_seconds(agent())
            begin = time.perf_counter()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.log(step, {"loss": float(loss.detach())})
            checkpointer.step(step)
            times.append(time.perf_counter() - begin)
        share = (processor_seconds(agent()) - of_agent) / (time.monotonic() - begun)
    ends.set()
    if dist.get_rank() == 0:
        record(step=statistics.median(times[WARM:]), agent=share)
    dist.barrier()
    dist.destroy_process_group()


def scrape(port: int, ends: threading.Event) -> None:
    """Read metrics each second and the page each other one, as an open browser does."""
    turn = 0
    while not ends.wait(1.0):
        turn += 1
        for place in ("metrics", "")[: 1 + turn % 2]:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/{place}", timeout=10) as answer:
                answer.read()


def measure(is_watched: bool, turn: Turn) -> Values:
    """A job with everything on, or off."""
    options = ["--fast-no-slow-ranks"]
    port = 0
    if is_watched:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        options = [f"--fast-metrics-port={port}", f"--fast-tensorboard={turn.folder / 'board'}"]
    records = turn.job(train, port, workers=RANKS, options=options)
    return {name: values_of(records, name) for name in ("step", "agent")}


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """The model of the example, a small one of 4 layers with 52 parameters, and a batch."""
    from examples.gpt2.model import GPT, GPTConfig

    model = GPT(GPTConfig(block_size=64, n_layer=4, n_head=4, n_embd=128, dropout=0.0))
    return model, torch.randint(256, (8, 64))


def hook_by_turns(turn: Turn, is_large: bool) -> None:
    """The worker: blocks of steps with hooks and without; processor time of this thread, per step."""
    from fastckpt._core.client.heartbeat import Heartbeat
    from fastckpt._core.memory.telemetry import Line

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bare, batch = gpt2() if is_large else (nn.Linear(16, 16), torch.randn(4, 16))
    steps = 3 if is_large else 40
    model = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def block(*, is_hooked: bool) -> float:
        beats, begin = Heartbeat(Line(), 0, 0, parts=is_hooked), 0.0
        for step in range(steps + 1):
            if step == 1:  # the first one finds the models
                begin = time.thread_time()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        beats.close()
        return (time.thread_time() - begin) / steps

    block(is_hooked=True)
    go_on, begun = torch.ones(1), time.perf_counter()
    while go_on.item():
        with_hooks, without = block(is_hooked=True), block(is_hooked=False)
        if dist.get_rank() == 0:
            record(hooks=with_hooks - without, plain=without)
        go_on.fill_(time.perf_counter() - begun < (HOOKED / 10 if turn.is_quick else HOOKED))
        dist.broadcast(go_on, 0)
    dist.destroy_process_group()


def hooks(is_large: bool, turn: Turn) -> Values:
    """Added processor time of a step."""
    records = turn.job(hook_by_turns, is_large, workers=RANKS, launcher="torch.distributed.run")
    return {name: values_of(records, name) for name in ("hooks", "plain")}


ON, OFF, SMALL, LARGE = "watched", "unwatched", "hooks, one layer", "hooks, GPT-2"
BENCHMARK = Benchmark(
    name="watching",
    question="What does the watching of a job cost?",
    work="Metrics, page, TensorBoard and the slow rank on, or off; 2 workers. Hooks: processor time of a step.",
    contenders=[
        Contender(ON, partial(measure, True)),
        Contender(OFF, partial(measure, False)),
        Contender(SMALL, partial(hooks, False)),
        Contender(LARGE, partial(hooks, True)),
    ],
    figures=[
        Figure("a step, watched : unwatched", f"{ON}.step", f"{OFF}.step"),
        Figure("the agent, of a core", f"{ON}.agent", unit=""),
        Figure("the agent, unwatched, of a core", f"{OFF}.agent", unit="", is_detail=True),
        *(Figure(f"{name}", f"{name}.hooks", unit="us", scale=1e6) for name in (SMALL, LARGE)),
        Figure("hooks : step, GPT-2", f"{LARGE}.hooks", f"{LARGE}.plain", Goal("at most", 0.002)),
    ],
    gigabytes=0.0,
)
