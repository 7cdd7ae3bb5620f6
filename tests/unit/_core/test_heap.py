"""Threads that transfer leave the processors to the training."""

from concurrent.futures import ThreadPoolExecutor

import torch

from fastckpt._core.heap import compute_alone


def test_a_thread_that_computes_alone_changes_the_number_of_no_other() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1, initializer=compute_alone) as alone, ThreadPoolExecutor(1) as other:
            assert alone.submit(torch.get_num_threads).result() == 1
            assert other.submit(torch.get_num_threads).result() == 2
            assert alone.submit(lambda: int(torch.ones(1 << 20).count_nonzero())).result() == 1 << 20
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
