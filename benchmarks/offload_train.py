"""The training that benchmarks/offload.py measures: the example's GPT-2, its activations kept in one of several ways.

It prints a line of JSON: seconds of each step, memory above the resident state, processor time, reports of offloading.
On a GPU the memory is that of torch's allocator, and a step ends when the GPU is done.
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.gpt2.model import GPT, GPTConfig

WAYS = ("none", "checkpoint", "offload", "both", "torch.save", "save_on_cpu", "save_on_cpu pinned", "TRL")
LEAST = 1 << 20
"""Bytes of a tensor that torch.save writes: as with offloading."""
Around = AbstractContextManager[Any]
SAMPLES = 0.003
"""Seconds between two looks at the memory, for the picture."""
MEMORY = ("memory.max_usage_in_bytes", "memory.usage_in_bytes"), ("memory.peak", "memory.current")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("directory", type=Path)
    for name, value in (("layers", 8), ("width", 512), ("length", 512), ("batch", 8), ("warmup", 2), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", default="auto", help="bytes, or auto")
    parser.add_argument("--cgroup", type=Path, help="the cgroup that this process is in")
    parser.add_argument("--untuned", action="store_true", help="leave the allocator of the process as it is")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=0, help="bytes of the GPU's memory that may be allocated")
    parser.add_argument("--trace", action="store_true", help="print the memory over one step, too")
    options = parser.parse_args()
    training = Training(options)
    for _ in range(options.warmup):
        training.step()
    with training.around():
        pass  # the beginning of a forward returns what the last backward has read into
    gc.collect()
    peak = Peak(options.cgroup) if options.device == "cpu" else DevicePeak()
    began = time.time()
    before = resource.getrusage(resource.RUSAGE_SELF), training.transferred()
    steps = [training.step() for _ in range(options.steps)]
    after = resource.getrusage(resource.RUSAGE_SELF), training.transferred()
    ended, memory = time.time(), peak.above()
    used = [usage.ru_utime + usage.ru_stime for usage in (before[0], after[0])]
    trace = traced(training) if options.trace else []
    found = {
        "steps": [sum(step) for step in steps],
        "between": (began, ended),
        "forward": [step[0] for step in steps],
        "memory": memory,
        "by": peak.by,
        "resident": peak.resident,
        "processor": (used[1] - used[0]) / options.steps,
        "transferred": (after[1] - before[1]) / options.steps,
        "gradients": training.gradients(),
        "trace": trace,
        **training.report(),
    }
    print(json.dumps(found))


class Training:
    """A model, its optimizer, and the way in which its activations are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        shape = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 64}
        self._on_gpu = options.device != "cpu"
        if options.limit:
            whole = torch.cuda.get_device_properties(options.device).total_memory
            torch.cuda.set_per_process_memory_fraction(options.limit / whole)
        self._model = GPT(GPTConfig(block_size=options.length, dropout=0.0, **shape)).to(options.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._tokens = torch.randint(0, 256, (options.batch, options.length)).to(options.device)
        self._offload: Any = None
        if options.way in ("checkpoint", "both"):
            self._model.blocks = nn.ModuleList(map(Checkpointed, self._model.blocks))
        if options.way in ("offload", "both"):
            from fastckpt.offload import ActivationOffload

            budget = options.budget if options.budget == "auto" else int(options.budget)
            self._offload = ActivationOffload(options.directory, budget=budget, return_memory=not options.untuned)
        elif not options.untuned:
            # What ActivationOffload does for a process by default, so that no way has an advantage by it.
            import ctypes

            ctypes.CDLL(None).mallopt(-3, 1 << 20)
        self.around = self._contexts(options)[options.way]()

    def _contexts(self, options: argparse.Namespace) -> dict[str, Callable[[], Callable[[], Around]]]:
        """Return a maker of the context of a forward for each way; only that of the measured one is called."""
        return {
            "none": lambda: contextlib.nullcontext,
            "checkpoint": lambda: contextlib.nullcontext,
            "offload": lambda: lambda: self._offload,
            "both": lambda: lambda: self._offload,
            "torch.save": lambda: (
                lambda: saved_tensors_hooks(lambda tensor: Saved.of(tensor, options.directory), Saved.load)
            ),
            "save_on_cpu": lambda: save_on_cpu,
            "save_on_cpu pinned": lambda: lambda: save_on_cpu(pin_memory=True),
            "TRL": lambda: of_trl(self._model),
        }

    def step(self) -> tuple[float, float]:
        """Seconds of the forward, and of the rest."""
        start = time.perf_counter()
        with self.around():
            logits = self._model(self._tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), self._tokens[:, 1:].flatten())
        middle = time.perf_counter()
        loss.backward()
        self._optimizer.step()
        # Gradients stay allocated: they are part of the resident state.
        self._optimizer.zero_grad(set_to_none=False)
        if self._on_gpu:
            torch.cuda.synchronize()
        return middle - start, time.perf_counter() - middle

    def gradients(self) -> float:
        """A number that is the same if, and only if, the gradients of all steps were, but for a coincidence."""
        return sum(float(parameter.double().abs().sum()) for parameter in self._model.parameters())

    def transferred(self) -> int:
        """Bytes written and read so far."""
        if self._offload is None:
            return 0
        report = self._offload.report()
        return report.written + report.read

    def report(self) -> dict[str, Any]:
        """Return offloading's own report."""
        if self._offload is None:
            return {}
        report = self._offload.report()
        names = ("budget", "kept", "left", "peak", "write_rate", "read_rate", "direct", "gpu_way", "failure")
        outcomes = {"wait": report.wait, "wrote": report.wrote}
        return {name: getattr(report, name) for name in names} | {
            f"{name}_{kind}": getattr(outcome, kind)
            for name, outcome in outcomes.items()
            for kind in ("planned", "measured")
        }


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._block, x, use_reentrant=False)


class Saved:
    """A tensor in a file of its own, by torch.save: the obvious hooks."""

    def __init__(self, tensor: torch.Tensor, directory: Path) -> None:
        descriptor, self._path = tempfile.mkstemp(dir=directory)
        os.close(descriptor)
        torch.save(tensor.detach(), self._path)

    @classmethod
    def of(cls, tensor: torch.Tensor, directory: Path) -> "Saved | torch.Tensor":
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return tensor if is_weight or tensor.nbytes < LEAST else cls(tensor, directory)

    @staticmethod
    def load(saved: "Saved | torch.Tensor") -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else torch.load(saved._path)

    def __del__(self) -> None:
        Path(self._path).unlink()


class Peak:
    """The most memory since now: of the cgroup where there is one, else of the process."""

    def __init__(self, cgroup: Path | None) -> None:
        self.by, self._peak = "VmHWM", Path()
        for most, now in MEMORY:
            # The kernel resets the peak of a cgroup of version 1, and newer ones that of version 2.
            if cgroup and (cgroup / most).exists():
                with contextlib.suppress(OSError):
                    (cgroup / most).write_text("0")
                    self.by, self._peak = most, cgroup / most
                    self.resident = int((cgroup / now).read_text())
                    return
        Path("/proc/self/clear_refs").write_text("5")
        self.resident = of_status("VmRSS")

    def above(self) -> int:
        """Bytes above what was resident."""
        return (of_status("VmHWM") if self.by == "VmHWM" else int(self._peak.read_text())) - self.resident


class DevicePeak:
    """The most memory of a GPU that was allocated since now."""

    by = "torch.cuda.max_memory_allocated"

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.resident = torch.cuda.memory_allocated()

    def above(self) -> int:
        """Bytes above what was resident."""
        return torch.cuda.max_memory_allocated() - self.resident


def of_trl(model: nn.Module) -> Callable[[], Around]:
    """The context of TRL, as its trainers make it: one for all steps."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    made = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return lambda: made


def of_status(name: str) -> int:
    """A number of kB in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def traced(training: Training) -> list[tuple[float, int]]:
    """Seconds and bytes of the process over one step."""
    looks: list[tuple[float, int]] = []
    ended = threading.Event()

    def look() -> None:
        page = resource.getpagesize()
        with Path("/proc/self/statm").open() as statm:
            while not ended.wait(SAMPLES):
                statm.seek(0)
                looks.append((time.perf_counter() - start, int(statm.read().split()[1]) * page))

    start = time.perf_counter()
    thread = threading.Thread(target=look)
    thread.start()
    forward, _ = training.step()
    ended.set()
    thread.join()
    return [(forward, 0), *looks]


if __name__ == "__main__":
    main()
