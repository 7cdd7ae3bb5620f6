"""A node more than the job can have waits for a place, and ends in good order with the job."""

from pathlib import Path

from torch.distributed import TCPStore

from tests.e2e.launcher.conftest import Jobs, until


def test_a_spare_node_that_never_got_a_place_ends_with_success_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    """torch's agent returns no result there, of which its launcher asks whether it has failed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "wait.py").write_text("import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n")
    arguments = (
        "--nnodes=1",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=spare",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=false",
        "--fast-require-persist",
        "wait.py",
    )

    def places_after(rounds: str) -> int:
        return sum(f"/{rounds}/slot/" in key for key in store.list_keys())

    def names() -> set[str]:
        """The names of the rounds that have been complete."""
        return {key.split("/")[-2] for key in store.list_keys() if key.endswith("/master")}

    first = jobs.start(*arguments)
    until(names, "the first node has formed the round")
    spare = jobs.start(*arguments)
    until(lambda: places_after(names().pop()), "the second node waits for a place")
    (tmp_path / "go").touch()
    first.ends()
    assert "this node waited without workers until the other nodes had ended the job" in spare.ends()
