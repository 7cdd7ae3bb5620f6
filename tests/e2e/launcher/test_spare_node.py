"""A node more than the job can have waits for a place, and ends in good order with the job."""

import base64
import pickle
from pathlib import Path

from torch.distributed import TCPStore

from tests.e2e.launcher.conftest import Jobs, until

STATE = "torch.rendezvous.spare"
NONE_YET = b"Y2FuaW1hZGFt"
"""What torch's backend has there before there is a state."""


def test_a_spare_node_that_never_got_a_place_ends_with_success_and_says_so(jobs: Jobs, tmp_path: Path) -> None:
    """torch's agent returns no result there, of which its launcher asks whether it has failed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "wait.py").write_text("import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n")
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

    def rendezvous() -> object:
        text = store.get(STATE) if store.check([STATE]) else NONE_YET
        return None if text == NONE_YET else pickle.loads(base64.b64decode(text))

    first = jobs.start(*arguments)
    until(lambda: getattr(rendezvous(), "complete", False), "the first node has formed the round")
    spare = jobs.start(*arguments)
    until(lambda: bool(getattr(rendezvous(), "redundancy_list", ())), "the second node waits for a place")
    (tmp_path / "go").touch()
    assert first.wait(60) == 0
    assert spare.wait(60) == 0, spare.stderr.read()
    assert "this node waited for a place in the job until the other nodes had ended it" in spare.stderr.read()
