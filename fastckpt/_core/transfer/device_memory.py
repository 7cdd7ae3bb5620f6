"""Estimates the memory of an accelerator that training leaves free."""

import torch


def room(device: torch.device) -> int:
    """Bytes of a device's memory that stay free at the peak of training so far."""
    # Memory that torch's allocator has reserved and not given to tensors can be used; memory that tensors took at the
    # peak, training will take again.
    free, _ = torch.accelerator.get_memory_info(device)
    stats = torch.accelerator.memory_stats(device)
    return int(free + stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.peak"])
