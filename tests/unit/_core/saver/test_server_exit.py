"""The saver of plain torchrun, in the first rank's process: its wait for other ranks at exit."""

import textwrap
from pathlib import Path

from tests.support.forked_programs import run

JOB = """
    import os, sys
    from pathlib import Path
    from fastckpt._core.config import RankInfo, Settings
    from fastckpt._core import in_process_saver as service
    from fastckpt._core.saver import server as saver
    from fastckpt._core.client.connection import SaverClient
    from fastckpt._core.client.save_results import TO_MEMORY
    from fastckpt._core.client.saver_options import saver_options
    from fastckpt._core.format.ids import SaveId
    from fastckpt._core.memory import slots

    saver.WRITERS_TIMEOUT = 3600
    hold, release = os.pipe()
    told, tell = os.pipe()

    def rank(number):
        place = RankInfo(rank=number, local_rank=number, world_size=2, local_world_size=2, master="launch:1")
        address = service.saver_address(place, Settings.from_environment())
        return SaverClient(saver_options(sys.argv[1], None, "never"), place, address)

    def begin(link, step):
        files = {f"rank_{link.place.rank}.pt": 4096}
        link.begin(SaveId(link.history, step), files)
        return Path(link.slot().slot), files

    def save(link, step):
        slot, files = begin(link, step)
        record = slots.SlotDone(SaveId(link.history, step), files, {"world_size": 2, "rank": link.place.rank})
        slots.commit(slot, link.place.rank, record)
        link.committed(record.id, TO_MEMORY)

    if os.fork() == 0:
        os.close(release)
        second = rank(1)
        save(second, 1)
        begin(second, 2)
        os.write(tell, b"x")
        os.read(hold, 1)  # until the first rank's process waits for it, or has ended
        save(second, 2)
        os.read(hold, 1)
        os._exit(0)
    os.close(hold)
    first = rank(0)
    save(first, 1)
    os.read(told, 1)
    save(first, 2)
    let_finish = saver.Saver._let_finish
    async def noted(self, **options):
        os.write(release, b"x")
        await let_finish(self, **options)
    saver.Saver._let_finish = noted
    try:
        raise RuntimeError("the first rank fails")
    except RuntimeError as error:
        first.close()
        service.leave_own_saver(failed=True)
        sys.exit(repr(error))
"""


def test_a_failed_first_rank_waits_for_the_saves_of_others_at_its_exit(tmp_path: Path, forked_launchers: None):
    """Not for one that waits for it: until its process has ended, nobody knows that it failed. But for its part."""
    [(code, said)] = run(tmp_path, textwrap.dedent(JOB), [(tmp_path / "checkpoints",)])
    assert code == 1 and "the first rank fails" in said
    assert [path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
