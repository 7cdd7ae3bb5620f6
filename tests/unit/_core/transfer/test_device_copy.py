"""Data that passes a buffer of bounded size arrives complete and in order."""

import random

import torch

from fastckpt._core.transfer.device_copy import CopyPiece, batches


def test_batches_contain_all_bytes_once_and_fit_the_buffer():
    for seed in range(300):
        random.seed(seed)
        room = random.randint(1, 50)
        sizes = [random.choice([0, 1, 7, room, room + 1, 3 * room + 2]) for _ in range(random.randint(0, 12))]
        target, pieces = 1000, []
        for size in sizes:
            pieces.append(CopyPiece(target, torch.arange(target, target + size, dtype=torch.int32).to(torch.uint8)))
            target += size + random.choice([0, 5])
        cut = list(batches(pieces, room))
        assert all(0 < sum(each.source.nbytes for each in batch) <= room for batch in cut)
        assert all(sum(each.source.nbytes for each in batch) == room for batch in cut[:-1])
        got = [(each.target + i, int(value)) for batch in cut for each in batch for i, value in enumerate(each.source)]
        assert got == [(each.target + i, (each.target + i) % 256) for each in pieces for i in range(each.source.nbytes)]
