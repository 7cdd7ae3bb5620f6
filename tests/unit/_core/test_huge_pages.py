"""Windows show the bytes of a file, where large pages can serve them."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable

import pytest

from fastckpt._core.huge_pages import HUGE, Mapping, collapse, own_pages, window
from tests.support.tables import for_each

SIZE = 3 * HUGE + 5
TIMES = 50


@pytest.fixture
def descriptor(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def assert_unmaps(use: Callable[[], object], *descriptors: int) -> None:
    """That a use leaves neither a file mapped nor addresses taken; other threads of this process take and give some."""
    before = addresses()
    for _ in range(TIMES):
        use()
    assert addresses() - before < TIMES * HUGE // 2
    inodes = {str(os.fstat(descriptor).st_ino) for descriptor in descriptors}
    with open("/proc/self/maps") as file:
        assert not [line for line in file if line.split()[4] in inodes]


def addresses() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def test_a_window_maps_its_part_of_a_file(descriptor):
    for offset, length in ((0, SIZE), (HUGE - 4096, 4096), (2 * HUGE + 4096, HUGE - 4091)):

        def use(offset=offset, length=length) -> None:
            with window(descriptor, offset, length) as part, part.view() as view:
                assert part.address % HUGE == offset % HUGE
                assert view.readonly

        assert_unmaps(use, descriptor)
        with window(descriptor, offset, length) as part, part.view() as view:
            assert view == os.pread(descriptor, length, offset)


@for_each(1, HUGE + 4097)
def test_a_mapping_begins_where_large_pages_can_serve_it_and_takes_no_more_addresses_than_its_file(length):
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(length)
        mapping = Mapping(file.fileno(), length)
        end = mapping.address + -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        with open("/proc/self/maps") as maps:
            assert f"{mapping.address:x}-{end:x} rw-s" in maps.read()
        assert mapping.address % HUGE == 0
        mapping.view[length - 1] = 7
        assert os.pread(file.fileno(), 1, length - 1) == b"\x07"
        mapping.close()
        assert_unmaps(lambda: Mapping(file.fileno(), length).close(), file.fileno())


def test_own_memory_keeps_its_bytes_in_large_pages_and_shared_memory_is_left_out(descriptor):
    own, shared = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE), mmap.mmap(-1, SIZE)
    file = mmap.mmap(descriptor, SIZE, mmap.MAP_PRIVATE)
    data = os.urandom(SIZE)
    for each in (own, shared, file):
        each[:] = data
    places = {each: ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (own, shared, file)}
    found = list(own_pages())
    inside = {each: [a for a in found if start <= a < start + SIZE] for each, start in places.items()}
    assert len(inside[own]) in (2, 3)  # how many whole ones lie in it is chance
    assert not inside[shared] and not inside[file]
    for address in inside[own]:  # what else is there of this process costs a second
        collapse(address)
    assert bytes(own) == data
