"""Memory of an accelerator that training leaves free."""

import torch


def room(device: torch.device) -> int:
    """Bytes that training does not need when it needs most of a device's memory, as far as that was seen."""
    free, _ = torch.accelerator.get_memory_info(device)
    stats = torch.accelerator.memory_stats(device)
    return int(free + stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.peak"])
