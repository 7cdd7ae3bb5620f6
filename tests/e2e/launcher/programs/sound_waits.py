"""Training with a sound wait of rank 0, of WAIT_SECONDS, before each step.

If WAIT_BACKEND is spins, the other rank waits as over NCCL: it uses the processor until rank 0 has come.
"""

import asyncio
import fcntl
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fastckpt import Checkpointer

environment = os.environ.get
backend, seconds = environment("WAIT_BACKEND"), float(environment("WAIT_SECONDS", "0"))
rank, folder = int(environment("RANK", "0")), Path(environment("JOB_FOLDER", "."))


def busily(work, *arguments) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work(*arguments)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(seconds)
        return index


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(seconds)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def sleep():
    time.sleep(seconds)


def lock_of_another_process():
    code = f"import fcntl, time; f = open('lock', 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep({seconds})"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with open("lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    holder.wait()
    holder.stdout.close()


def http_server_that_is_slow():
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.handle_request, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").read()
    server.server_close()


def program_that_sleeps():
    subprocess.run(["sleep", str(seconds)], check=True)


def program_that_computes():
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)


def loader_worker():
    assert list(DataLoader(Slow(), num_workers=1, multiprocessing_context="spawn"))


def poll_of_a_descriptor():
    here, there = os.pipe()
    threading.Timer(seconds, os.write, (there, b"x")).start()
    select.select([here], [], [])
    os.close(here)
    os.close(there)


def event_loop():
    asyncio.run(asyncio.sleep(seconds))


def alarm():
    came: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, _: came.append(number))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while not came:
        signal.pause()


def output_that_nobody_reads():
    """The test reads when that was said."""
    for _ in range(20):
        os.write(1, b"x" * 65535 + b"\n")


def computing_in_python():
    busily(sum, range(1000))


def computing_in_c_with_the_gil():
    busily(hashlib.pbkdf2_hmac, "sha256", b"x", b"y", 10**6)


def key_of_a_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    threading.Timer(seconds, dist.TCPStore("127.0.0.1", store.port).set, ("key", "x")).start()
    assert store.get("key") == b"x"


def being_stopped_and_continued():
    code = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    helper = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    helper.wait()


def evaluation_that_nobody_marked():
    with torch.no_grad():
        busily(lambda: (alone(torch.ones(1, 8)), time.sleep(0.05)))


WAITS = [
    sleep,
    lock_of_another_process,
    http_server_that_is_slow,
    program_that_sleeps,
    program_that_computes,
    loader_worker,
    poll_of_a_descriptor,
    event_loop,
    alarm,
    output_that_nobody_reads,
    computing_in_python,
    computing_in_c_with_the_gil,
    key_of_a_store,
    being_stopped_and_continued,
    evaluation_that_nobody_marked,
]


def wait_for_rank_0(number: int) -> None:
    """Wait as over NCCL, in a function of torch: the processor is busy until the others have come."""
    path = folder / f"came-{number}"
    if rank == 0:
        path.touch()
    elif backend == "spins":
        spin(path)


def spin(path: Path) -> None:
    program = "def synchronize(path):\n    while not exists(path): pass"
    names = {"exists": os.path.exists}
    exec(compile(program, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), names)
    names["synchronize"](path)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    torch.manual_seed(0)
    layer, alone = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(folder / "checkpoints", model=model, optimizer=optimizer, every={"memory": 1}) as checkpointer:
        assert checkpointer.resume() == 0
        for step in range(1, 4):  # the pace is known by then
            (model(torch.ones(2, 8)).sum() / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step)
        for number, wait in enumerate(WAITS):
            if rank == 0:
                began = time.monotonic()
                wait()
                print(f"waited {wait.__name__} {began} {time.monotonic()}", flush=True)
            wait_for_rank_0(number)
            (model(torch.ones(2, 8)).sum() / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(number + 4)
        dist.barrier()
    print(f"rank {rank} ends", flush=True)
    dist.destroy_process_group()
