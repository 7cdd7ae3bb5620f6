"""Memory of processes: of a family of forked ones, and of one that is gone."""

import os
import subprocess
import sys

from fastckpt._core.memory.processes import own_memory

SIZE = 64 << 20
FAMILY = f"""
import os, sys, time
heap = bytearray(b"x" * {SIZE})
child = os.fork()
if child:
    print(child, flush=True)
    sys.stdin.read()
    os.kill(child, 9)
else:
    time.sleep(600)
"""


def test_pages_that_forked_processes_share_count_in_each_as_they_stop_to_share_them_when_they_exit():
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as family:
        assert family.stdin and family.stdout
        child = int(family.stdout.readline())
        both, one = own_memory(family.pid), own_memory(child)
        family.stdin.close()
    assert SIZE < one < SIZE + (32 << 20) and 2 * SIZE < both < 2 * (SIZE + (32 << 20))


def test_a_process_that_is_gone_has_none():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert own_memory(gone.pid) == 0 and own_memory(os.getpid()) > 0
