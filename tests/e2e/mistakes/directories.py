"""Mistakes with the checkpoint directory and its contents, the environment and the launcher."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from fsspec.registry import _registry

from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import ConfigError
from fastckpt_run.main import main
from tests.e2e.mistakes.table import WARNING, WORKS, Row, Scene, answered, mistakes, save, train

mistakes(
    lambda scene, make: make(),
    directory_empty=Row(partial(train, ""), ConfigError, "checkpoint_dir is '' | a directory | such as 'checkpoints'"),
    directory_that_cannot_be_made=Row(
        partial(save, "/proc/nope/checkpoints"),
        ConfigError,
        "/proc/nope/checkpoints | No such file or directory | give",
    ),
    directory_of_an_unknown_protocol=Row(
        partial(save, "s4://bucket/run"), ConfigError, "s4://bucket/run | s4 | such as s3://bucket/run1"
    ),
)


@answered(ConfigError, "checkpoints is a file | a directory | give")
def directory_is_a_file(scene: Scene) -> None:
    Path(scene.directory).write_text("x")
    save(scene.directory)


@answered(ConfigError, "checkpoint of step 1 itself | directory that it is in | resume(step=1)")
def directory_is_a_checkpoint(scene: Scene) -> None:
    train(scene.directory, steps=1)
    try:
        save(f"{scene.directory}/checkpoint-1")
    finally:
        assert not Path(scene.directory, "checkpoint-1/.fastckpt").exists(), "nothing is put into it"


@answered(WORKS)
def directory_in_the_home_directory(scene: Scene) -> None:
    home = Path(scene.directory).parent
    scene.has(HOME=home)
    scene.environment.chdir(home)
    save("~/checkpoints")
    assert Path(scene.directory).is_dir() and not Path("~").exists()
    Path("~/checkpoints").mkdir(parents=True)
    save("~/checkpoints")
    assert any(Path("~/checkpoints").iterdir()), "what an earlier version has made"


@answered(WARNING, "Read-only file system | cannot be written to | choose another directory")
def directory_read_only(scene: Scene) -> None:
    """Training goes on: it may be mounted for writing again, and memory holds what was saved."""
    shared_memory = os.environ["FASTCKPT_SHM_DIR"]
    mounted = scene.mount(4)
    scene.has(FASTCKPT_SHM_DIR=shared_memory)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    DdpCheckpointer(mounted).close()


@answered(ConfigError, "s3://bucket/run | s3fs | pip install")
def directory_whose_package_is_not_there(scene: Scene) -> None:
    hidden = Path(scene.directory).with_name("hidden")
    hidden.mkdir()
    (hidden / "s3fs.py").write_text("raise ImportError('no s3fs here')")
    scene.environment.syspath_prepend(hidden)
    scene.environment.delitem(sys.modules, "s3fs", raising=False)
    scene.environment.delitem(_registry, "s3", raising=False)  # a test before may have needed it
    save("s3://bucket/run")


ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "tests/e2e/launcher/programs" / "touch.py")
ADDRESS = "tcp://10.0.171.239:80"
OF_KUBERNETES = {
    "SERVICE_HOST": "10.0.171.239",
    "SERVICE_PORT_HTTP": "80",
    "PORT": ADDRESS,
    "PORT_80_TCP": ADDRESS,
    "PORT_80_TCP_PROTO": "tcp",
    "EVENTS_SERVICE_HOST": "10.0.171.240",
    "EVENTS_PORT": ADDRESS,
}
"""Variables of each pod of a namespace that has a service called fastckpt."""


def with_variables(scene: Scene, variables: dict[str, str]) -> None:
    scene.has(**{f"FASTCKPT_{name}": value for name, value in variables.items()})
    save(scene.directory)


mistakes(
    with_variables,
    variable_typo=Row({"SLOT": "2"}, WARNING, "FASTCKPT_SLOT  | no setting | did you mean FASTCKPT_SLOTS?"),
    variables_of_kubernetes=Row(OF_KUBERNETES, WORKS),
)


@answered(SystemExit, "no such option: --fast-slto | given in full | did you mean --fast-slots?")
def option_typo(scene: Scene) -> None:
    main(["--fast-slto", "2", SCRIPT])


@answered(WARNING, "shm_dir is  | on a disk | --fast-no-memory")
def memory_on_a_disk(scene: Scene) -> None:
    disk = Path(scene.directory).with_name("disk")
    disk.mkdir(mode=0o700)
    scene.has(FASTCKPT_SHM_DIR=disk)
    save(scene.directory)
