"""Mistakes with the environment, the launcher, and who takes part."""

from pathlib import Path

from fastckpt_run.main import main
from tests.e2e.mistakes.table import WARNING, WORKS, Row, Scene, answered, mistakes, save

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
