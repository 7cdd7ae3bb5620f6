"""The count of reads that tests of hosts rely on."""

import mmap
from pathlib import Path

from tests.nodes.storage_reads import StorageReads


def test_files_that_are_read_or_mapped_are_counted_and_those_that_are_written_or_listed_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for name in ("read", "mapped", "written", "listed"):
        (folder / name).write_bytes(b"bytes")
    with StorageReads(tmp_path) as reads:
        (folder / "read").read_bytes()
        with (folder / "mapped").open("rb") as file:
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
        with (folder / "written").open("r+b") as file:
            file.write(b"other")
        assert [path.stat().st_size for path in folder.iterdir()] == [5] * 4
        assert {path.name for path in reads.paths()} == {"read", "mapped"}
        assert reads.paths() == set()
