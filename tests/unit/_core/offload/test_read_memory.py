"""Memory for reads is used again when its last tensor dies, and never while one lives, in any thread or process."""

import os
import random
import threading

import torch

from fastckpt._core.huge_pages import HUGE
from fastckpt._core.offload.read_memory import ReadMemory

MIB = 1 << 20


def test_memory_is_used_again_once_its_last_view_is_gone():
    memory = ReadMemory()
    first = memory.take(2 * MIB)
    address = first.data_ptr()
    assert address % HUGE == 0 and first.numel() == 2 * MIB
    view = first.fill_(7)[3:5]
    del first
    other = memory.take(2 * MIB)
    assert memory.free == 0 and other.data_ptr() != address and view.tolist() == [7, 7]
    del view
    assert memory.take(2 * MIB).data_ptr() == address


def test_threads_never_share_memory():
    memory, wrong = ReadMemory(), []

    def work(number: int) -> None:
        chance = random.Random(number)
        mine: list[torch.Tensor] = []
        for _ in range(100):
            mine.append(memory.take(chance.choice([MIB, 2 * MIB]))[:4096].fill_(number))
            wrong.extend(each for each in mine if not bool((each == number).all()))
            if len(mine) > 3:
                mine.pop(chance.randrange(len(mine)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and memory.free <= 16 * 2 * MIB


def test_a_forked_process_that_drops_a_tensor_leaves_it_to_its_parent():
    memory = ReadMemory()
    tensor = memory.take(MIB).fill_(9)
    child = os.fork()
    if not child:
        whole = tensor[:: MIB // 8].tolist() == [9] * 8
        del tensor
        memory.give_back()
        os._exit(0 if whole and memory.free == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor[:: MIB // 8].tolist() == [9] * 8
