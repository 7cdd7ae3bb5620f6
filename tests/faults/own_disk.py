"""An agent of a node whose checkpoint directory is on a disk of its own: ``own_disk.py <disk> <directory> <launcher>``.

In a mount namespace of its own: what other nodes, and the test, find under the directory's name is not what it finds.
"""

import os
import subprocess
import sys

import pytest

UNSHARE = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)), "--mount", "--")
MOUNT = 'mount --bind "$0" "$1" && shift && exec "$@"'


def needs_mounts() -> None:
    """Skip a test where this user may not mount anything."""
    tried = subprocess.run([*UNSHARE, "mount", "--bind", "/tmp", "/tmp"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mounts are permitted here: {tried.stderr.strip()}")


if __name__ == "__main__":
    disk, directory, *launcher = sys.argv[1:]
    os.makedirs(disk, exist_ok=True)
    os.makedirs(directory, exist_ok=True)
    os.execvp(UNSHARE[0], [*UNSHARE, "sh", "-c", MOUNT, disk, directory, sys.executable, *launcher])
