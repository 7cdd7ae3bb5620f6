"""A save of a model on an accelerator: what it stalls a step, overlapped and at once, with pinned images and others."""

from functools import partial
from typing import Any

import torch

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Turn, record, values_of
from benchmarks.suite._limits import seconds
from benchmarks.suite._states import storages

WINDOW = 4
"""Steps over which a stall is measured: an overlapped copy ends before the next optimizer's step."""
WINDOWS = 5
MODEL_SHARE = 1 / 3
"""Share of the model in the state: AdamW keeps two more tensors for each parameter."""


def missing() -> str:
    """The reason for which it cannot run here."""
    return "" if torch.accelerator.is_available() else "no accelerator"


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was launched; the CPU has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def save_beside_steps(turn: Turn, kind: str, overlaps: bool, is_pinned: bool) -> None:
    """The worker: windows of steps without a save and with one by turns, and copies to pinned and pageable memory."""
    from fastckpt import DdpCheckpointer, StorageType
    from fastckpt._core.transfer import image

    if not is_pinned:
        image.pin = lambda *_: False  # as where the driver refuses: copies go by way of pinned buffers
    device = torch.device(kind, 0) if kind != "cpu" else torch.device("cpu")
    step, optimizer, state = training(turn.gigabytes, device)
    with DdpCheckpointer(turn.folder / "checkpoints", overlap=optimizer if overlaps else None) as checkpointer:

        def window(number: int, *, saves: bool) -> None:
            for each in range(WINDOW):
                step()
                if saves and each == 0:
                    save = partial(checkpointer.save_checkpoint, number, state(), storage_type=StorageType.MEMORY)
                    record(save=seconds(save))
            synchronize(device)

        checkpointer.prepare(state())
        for number in range(3):
            checkpointer.save_checkpoint(number, state(), storage_type=StorageType.MEMORY)  # each slot is used once
        window(3, saves=True)
        for number in range(4, 4 + WINDOWS):
            without, with_save = (seconds(partial(window, number, saves=saves)) for saves in (False, True))
            record(plain=without / WINDOW, stall=with_save - without)
        record(**copies(storages(state()), device))


def training(gigabytes: float, device: torch.device) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A step of a wide perceptron with AdamW whose state has that size, its optimizer, and what gives its state."""
    layers = 8
    width = max(64, int((gigabytes * 1e9 / 4 * MODEL_SHARE / layers) ** 0.5))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(64, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    return step, optimizer, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def copies(sources: list[torch.Tensor], device: torch.device) -> dict[str, list[float]]:
    """Seconds of the driver's own copies to host memory that is pinned, and that is not, both warm."""
    found: dict[str, list[float]] = {}
    size = max(source.numel() for source in sources)
    for name, is_pinned in (("pinned copy", True), ("pageable copy", False)):
        # One target of the largest: the memory of the host is needed for the slots.
        target = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned and device.type != "cpu")

        def copy(target: torch.Tensor = target) -> None:
            for source in sources:
                target[: source.numel()].copy_(source, non_blocking=True)
            synchronize(device)

        copy()
        found[name] = [seconds(copy) for _ in range(WINDOWS)]
    return found


def measure(turn: Turn, *, overlaps: bool, is_pinned: bool) -> Values:
    """Stalls, saves and copies of one job on the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    records = turn.job(save_beside_steps, accelerator.type, overlaps, is_pinned)
    return {name: values_of(records, name) for name in ("save", "plain", "stall", "pinned copy", "pageable copy")}


WAYS = {
    "overlap": (True, True),
    "at once": (False, True),
    "overlap, unpinned": (True, False),
    "at once, unpinned": (False, False),
}
BENCHMARK = Benchmark(
    name="device_save",
    question="What does a save of a model on an accelerator cost a step, compared with a copy by the driver?",
    work="A perceptron with AdamW on the device, one worker.",
    contenders=[
        Contender(name, partial(measure, overlaps=overlaps, is_pinned=is_pinned), missing)
        for name, (overlaps, is_pinned) in WAYS.items()
    ],
    figures=[
        Figure("a step without a save", "overlap.plain"),
        Figure("a copy to pinned memory, the limit", "at once.pinned copy"),
        Figure("a copy to pageable memory : to pinned", "at once.pageable copy", "at once.pinned copy"),
        Figure("save at once : copy", "at once.save", "at once.pinned copy", Goal("at most", 1.2)),
        *(Figure(f"stall of a step, {name}", f"{name}.stall") for name in WAYS),
        Figure("stall, overlap : at once", "overlap.stall", "at once.stall"),
        Figure("save at once, unpinned : pinned", "at once, unpinned.save", "at once.save"),
    ],
)
