"""Memory of an accelerator: what training takes of it, and what is free."""

import contextlib

import torch


def use_of(device: torch.device) -> tuple[int, int]:
    """Bytes of its memory that torch took at most, and all there are; nothing of memory that is not counted (MPS)."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):
            most, (_, total) = torch.accelerator.max_memory_allocated(device), torch.accelerator.get_memory_info(device)
            return int(most), int(total)
    return 0, 0


def room(device: torch.device) -> tuple[int, int]:
    """Bytes that training does not need when it needs most of a device's memory, as far as that was seen.

    Returns:
        Those that torch has not even reserved, which another stream can have without taking any from training's
        cache; and all of them, which training's own stream can have.
    """
    free, _ = torch.accelerator.get_memory_info(device)
    stats = torch.accelerator.memory_stats(device)
    spare = int(free + stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.peak"])
    return min(int(free), spare), spare


def squeezes(device: torch.device) -> int:
    """How often memory of a device got so short that torch gave its cache back."""
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))
