"""GPUDirect Storage is refused by name where it is not; what cuFile answers is understood, and tried before it is used.

There is no GPU here: the functions of cuFile are those of a small library that transfers by pread and pwrite.
"""

import ctypes
import errno
import logging
import os
import shutil
import subprocess

import pytest
import torch

from fastckpt._core.offload.gpudirect_storage import CuFile, GpuDirectStorage, check
from fastckpt._core.offload.scratch_file import ScratchFile

CPU = torch.device("cpu")
SOURCE = """
#include <sys/types.h>
#include <unistd.h>
#include <errno.h>
/* As in cufile.h; the handle is a descriptor. */
extern "C" {
ssize_t most = 1 << 30, answer = 0; int number = 0, calls = 0, spoil = 0;
ssize_t cuFileRead(void *fh, void *base, size_t size, off_t offset, off_t within) {
  calls++;
  if (answer) { errno = number; return answer; }
  return pread((long)fh, (char *)base + within, size < (size_t)most ? size : most, offset);
}
ssize_t cuFileWrite(void *fh, const void *base, size_t size, off_t offset, off_t within) {
  calls++;
  if (answer) { errno = number; return answer; }
  return pwrite((long)fh, (const char *)base + within, size < (size_t)most ? size : most, offset + spoil);
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("cufile") / "libcufile-of-files.so"
    path.with_suffix(".cpp").write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, path.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def file(tmp_path):
    made = ScratchFile(tmp_path)
    if not made.direct:
        pytest.skip("no O_DIRECT here")
    return made


def put(library, **values: int) -> None:
    for name, value in values.items():
        (ctypes.c_ssize_t if name in ("most", "answer") else ctypes.c_int).in_dll(library, name).value = value


@pytest.fixture
def cufile(library, file):
    put(library, most=1 << 30, answer=0, number=0, calls=0, spoil=0)
    # Through the page cache: host memory of torch is not aligned for O_DIRECT.
    descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
    yield CuFile(descriptor, file.unit, library._name)
    os.close(descriptor)


def test_bytes_come_back_also_in_several_calls_and_a_trial_finds_those_that_went_elsewhere(library, file, cufile):
    region = file.take(8 * file.unit)
    check(cufile, file, CPU, region.start + file.unit)
    put(library, most=3 * file.unit + 100, calls=0)  # the part of a unit is asked for again
    memory = torch.randint(0, 256, (7 * file.unit,), dtype=torch.uint8)
    found = torch.zeros_like(memory)
    cufile.write(memory, region.start + file.unit)
    assert ctypes.c_int.in_dll(library, "calls").value == 3
    cufile.read(found, region.start + file.unit)
    assert torch.equal(found, memory)
    put(library, most=1 << 30, spoil=1)
    with pytest.raises(OSError, match="did not write what it was given"):
        check(cufile, file, CPU, region.start)


@pytest.mark.parametrize(
    ("name", "answer", "number", "expected"),
    [
        ("write", -1, errno.ENOSPC, "No space left"),
        ("read", -5011, 0, "error 5011"),
        ("write", 100, 0, "100 bytes"),
    ],
)
def test_what_cufile_cannot_do_is_an_error_of_the_file(library, file, cufile, name, answer, number, expected):
    put(library, answer=answer, number=number)
    with pytest.raises(OSError, match=f"cuFile cannot {name}: {expected}") as error:
        getattr(cufile, name)(torch.zeros(file.unit, dtype=torch.uint8), 0)
    assert error.value.errno == (number or errno.EIO)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be GPUDirect Storage")
@pytest.mark.parametrize("with_module", [False, True])
def test_one_line_says_once_why_there_is_none(tmp_path, file, caplog, with_module):
    storage = GpuDirectStorage(file, tmp_path if with_module else tmp_path / "missing")
    assert storage.way == ""
    with caplog.at_level(logging.INFO, "fastckpt"):
        assert storage.tried(CPU, 0) is None and storage.tried(CPU, 0) is None
    reason = "torch._C._gds_register_handle is not supported" if with_module else "the kernel module nvidia-fs"
    assert storage.way.startswith(f"pinned memory ({reason}")
    assert [record.getMessage() for record in caplog.records] == [
        f"activations on GPUs are offloaded through {storage.way}"
    ]
