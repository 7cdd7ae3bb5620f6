"""Mistakes with the environment, the launcher, and who takes part."""

import tempfile
from pathlib import Path

from fastckpt.errors import ConfigError
from fastckpt_run.main import main
from tests.e2e.mistakes.table import WARNING, WORKS, Scene, answered, save
from tests.faults.jobs import run_forked

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "tests/e2e/launcher/programs" / "touch.py")
FIRST_RANK_ONLY = str(Path(__file__).with_name("first_rank_only.py"))


@answered(WARNING, value="FASTCKPT_SLOT ", limit="no setting", remedy="did you mean FASTCKPT_SLOTS?")
def variable_typo(scene: Scene) -> None:
    scene.environment.setenv("FASTCKPT_SLOT", "2")
    save(scene.directory)


@answered(ConfigError, value="slots is 5", limit="2 or 3", remedy="FASTCKPT_SLOTS")
def variable_out_of_range(scene: Scene) -> None:
    scene.environment.setenv("FASTCKPT_SLOTS", "5")
    save(scene.directory)


@answered(ConfigError, value="FASTCKPT_FLUSH is 'maybe'", limit="yes or no", remedy="give")
def variable_of_another_kind(scene: Scene) -> None:
    scene.environment.setenv("FASTCKPT_FLUSH", "maybe")
    save(scene.directory)


@answered(WORKS)
def variables_of_kubernetes(scene: Scene) -> None:
    """What Kubernetes sets in each pod of a namespace that has a service called fastckpt."""
    address = "tcp://10.0.171.239:80"
    for name, value in {
        "SERVICE_HOST": "10.0.171.239",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT": address,
        "PORT_80_TCP": address,
        "PORT_80_TCP_PROTO": "tcp",
        "PORT_80_TCP_PORT": "80",
        "PORT_80_TCP_ADDR": "10.0.171.239",
        "EVENTS_SERVICE_HOST": "10.0.171.240",
        "EVENTS_PORT": address,
    }.items():
        scene.environment.setenv(f"FASTCKPT_{name}", value)
    save(scene.directory)


@answered(SystemExit, value="--fast-stop-grace is 'ten'", limit="a number", remedy="give")
def option_of_another_kind(scene: Scene) -> None:
    main(["--fast-stop-grace", "ten", SCRIPT])


@answered(WARNING, value="shm_dir is ", limit="on a disk", remedy="--fast-no-memory")
def memory_on_a_disk(scene: Scene) -> None:
    disk = Path(scene.directory).with_name("disk")
    disk.mkdir(mode=0o700)
    scene.environment.setenv("FASTCKPT_SHM_DIR", str(disk))
    save(scene.directory)


@answered(SystemExit, value="no such option: --fast-slto", limit="given in full", remedy="did you mean --fast-slots?")
def option_typo(scene: Scene) -> None:
    main(["--standalone", "--fast-slto", "2", SCRIPT])


@answered(SystemExit, value="slots is 5", limit="2 or 3", remedy="give")
def option_out_of_range(scene: Scene) -> None:
    main(["--standalone", "--fast-slots=5", SCRIPT])


@answered(SystemExit, value="no such script: trian.py", limit="no file", remedy="give")
def script_typo(scene: Scene) -> None:
    folder = str(Path(scene.directory).parent)  # torch makes directories, and handles signals
    scene.environment.setattr(tempfile, "tempdir", folder)
    scene.environment.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    main(["trian.py"])


@answered(WARNING, value="rank 1", limit="to save it, too", remedy="on every rank")
def first_rank_only_saves(scene: Scene) -> None:
    scene.printed.append(_of_two_ranks(scene, "saves"))


@answered(WARNING, value="rank 1", limit="to save it, too", remedy="on every rank")
def first_rank_only_steps(scene: Scene) -> None:
    scene.printed.append(_of_two_ranks(scene, "steps"))


def _of_two_ranks(scene: Scene, what: str) -> str:
    """What a job prints whose second rank leaves something to the first."""
    folder = Path(f"{scene.directory}-job")
    shape = ("--standalone", "--nproc_per_node=2", "--log-dir", folder / "logs")
    return run_forked(folder, *shape, FIRST_RANK_ONLY, what, scene.directory)
