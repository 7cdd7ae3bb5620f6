"""The scratch file has no name, and needs no O_DIRECT, O_TMPFILE or fallocate."""

import errno
import gc
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastckpt._core.io.unbuffered import SECTOR
from fastckpt._core.offload.scratch_file import ScratchFile
from fastckpt._core.offload.staging import STAGING
from fastckpt._core.offload.transfers import Transfers, Written
from tests.support.forked_programs import run

MIB = 1 << 20


@pytest.fixture(params=["disk", "ramfs"])
def place(request, tmp_path):
    """ramfs has neither O_DIRECT nor fallocate."""
    if request.param == "disk":
        yield tmp_path
        return
    command = ["mount", "-t", "ramfs", "-o", "mode=700", "ramfs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount ramfs: {done.stderr.strip()}")
    yield tmp_path
    gc.collect()
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("size", [1, 2 * STAGING + SECTOR])
def test_bytes_come_back_as_they_were_written(place, size):
    file = ScratchFile(place)
    transfers = Transfers(file)
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8), torch.randn(1000), torch.randn(size // 8 + 5)[2:-3]]
    region = file.take(transfers.room(sum(part.numel() * part.element_size() for part in parts), 3))
    other = file.take(transfers.room(MIB, 1))
    ones = transfers.write([torch.ones(MIB, dtype=torch.uint8)], other)
    written = transfers.write(parts, region)
    for part, found in zip(parts, transfers.fetch(written, torch.device("cpu")), strict=True):
        assert torch.equal(found.view(part.dtype), part)
    assert int(transfers.fetch(ones, torch.device("cpu"))[0].sum()) == MIB
    last = written[-1]
    assert last.offset + last.head + last.size <= region.end
    assert os.listdir(place) == []


@pytest.mark.parametrize("start", [4, 64])
def test_bytes_that_begin_anywhere_come_back(tmp_path, start):
    """Those of torch's own memory are written with the pages around them, others through staging memory."""
    file = ScratchFile(tmp_path)
    memory = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)
    part = memory[start : start + 2 * MIB + 100]
    transfers = Transfers(file)
    written = transfers.write([part], file.take(transfers.room(part.numel(), 1)))
    assert (written[0].head > 0) == ((memory.data_ptr() + start) % 64 == 0 and (memory.data_ptr() + start) % 4096 > 0)
    assert torch.equal(transfers.fetch(written, torch.device("cpu"))[0], part)


def test_a_directory_without_nameless_files_has_none_with_a_name_either(tmp_path, monkeypatch):
    opened = os.open

    def refusing(path, flags, *mode, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", refusing)
    file = ScratchFile(tmp_path)
    assert os.listdir(tmp_path) == [] and os.fstat(file.descriptor).st_nlink == 0
    assert file.direct == ScratchFile(tmp_path).direct


def test_a_read_beyond_the_end_of_the_file_is_an_error(tmp_path):
    file = ScratchFile(tmp_path)
    region = file.take(MIB)
    os.ftruncate(file.descriptor, MIB // 2)
    with pytest.raises(OSError, match="ends at 524288"):
        Transfers(file).fetch([Written(region.start, 0, MIB)], torch.device("cpu"))


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_threads_that_are_refused_o_direct_at_once_all_go_through_the_page_cache(tmp_path, monkeypatch, name):
    file = ScratchFile(tmp_path)
    if not file.direct:
        pytest.skip("no O_DIRECT here")
    parts = [torch.full((MIB,), number, dtype=torch.uint8) for number in (1, 2)]
    transfers, call, both = Transfers(file), getattr(os, name), threading.Barrier(2)
    regions = [file.take(transfers.room(MIB, 1)) for _ in parts]

    def refused(descriptor, data, offset):
        if file.direct:
            both.wait(60)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(descriptor, data, offset)

    if name == "pwrite":
        monkeypatch.setattr(os, name, refused)
    with ThreadPoolExecutor(2) as threads:
        written = list(threads.map(lambda part, region: transfers.write([part], region), parts, regions))
        monkeypatch.setattr(os, name, refused)
        found = list(threads.map(lambda each: transfers.fetch(each, torch.device("cpu"))[0], written))
    assert not file.direct and all(map(torch.equal, found, parts))


STILL_OPEN = """
import atexit, os, sys
atexit.register(lambda: os.fstat(file.descriptor) and print("open"))
from pathlib import Path
from fastckpt._core.offload.scratch_file import ScratchFile
file = ScratchFile(Path(sys.argv[1]))
"""


def test_the_file_is_open_for_threads_that_read_while_the_process_ends(tmp_path, forked_launchers):
    """Closed earlier, its number may be that of another file, whose bytes a daemon thread would take for its own."""
    assert run(tmp_path, STILL_OPEN, [(tmp_path,)]) == [(0, "open\n")]
