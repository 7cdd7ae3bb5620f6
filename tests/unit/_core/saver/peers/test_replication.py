"""The thread that copies and reports: nothing that goes wrong ends it."""

from contextlib import closing
from pathlib import Path

import pytest

from fastckpt._core.saver.peers import replication
from fastckpt._core.saver.peers.common_saves import CommonSave, CommonSaves
from fastckpt._core.saver.peers.peer_round import Peer, PeerRound
from fastckpt._core.saver.peers.replica_sender import ReplicaSender
from fastckpt._core.saver.peers.replication import Replication
from fastckpt._core.saver.stats import ReplicaCounts
from tests.support.waits import until
from tests.unit._core.saver.peers.agents import DIRECTORY, SECRET, write_save

PEERS = [Peer("own", "m", "127.0.0.1:1"), Peer("other", "m", "127.0.0.1:1")]


def test_an_agent_reports_again_after_it_could_take_no_note_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replication, "RETRY", 0.01)
    monkeypatch.setattr(replication, "GIVE_UP", 0.0)
    slot = tmp_path / "slot-0"
    slot.mkdir()
    write_save(slot, 5, {}, 0)
    answers: list[CommonSave | None] = []
    errors = [TimeoutError("the loop is busy"), RuntimeError("can't start new thread"), TimeoutError("it still is")]

    def note(answer: CommonSave | None) -> None:
        answers.append(answer)
        if errors:
            raise errors.pop()

    common = CommonSaves([peer.id for peer in PEERS])
    sender = ReplicaSender(DIRECTORY, None, ReplicaCounts())
    with closing(Replication(DIRECTORY, tmp_path, lambda: [slot], note, lambda _: common, sender)) as made:
        made.assume(PeerRound(PEERS, 0, SECRET))
        until(lambda: len(answers) > 5)
    assert answers[-1] is not None and None in answers[:3]
