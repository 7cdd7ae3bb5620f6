"""The live page of a real job of two nodes: before, during and after a failure, and its actions."""

import json
from pathlib import Path

from click.testing import CliRunner

from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt_run.cli import main
from tests.e2e.launcher.conftest import FORK
from tests.e2e.watch.conftest import trains, workers
from tests.support.ports import free_port


def test_the_page_shows_a_job_of_two_nodes_that_fails_and_resumes_and_its_actions_flush_and_stop_it(
    watch, tmp_path: Path
) -> None:
    """One job for all of it: what it costs is its start."""
    meeting = (*FORK, "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=live", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    a, b = agents = [watch(name, *meeting) for name in ("a", "b")]

    # --- both nodes have met: one of them is the first
    a.until(lambda: 421 in (a.ask("/")[0], b.ask("/")[0]), "the nodes meet")
    first, second = (a, b) if b.ask("/")[0] == 421 else (b, a)
    assert f"The page of the job is that of node 0: {first.url} on " in second.ask("/")[1]
    assert second.ask("/status.json")[0] == second.ask("/flush", token=second.address["token"])[0] == 421

    # --- before a failure: all workers, and what a loss would cost
    before = first.until_status(
        lambda now: trains(now) and now["loss"] and now["loss"][0]["node"]["save"], "both train, with a durable save"
    )
    assert [node["answers"] for node in before["nodes"]] == [True, True]
    assert sorted(worker["rank"] for worker in workers(before)) == [0, 1]
    (loss,) = before["loss"]
    assert loss["directory"] == str(tmp_path / "run") and loss["node"]["save"][1] >= 5  # durable, or with both nodes
    assert loss["worker"]["steps"] <= loss["node"]["steps"] and loss["storage"] is None
    html = first.ask("/")[1]
    assert "train.py" in html and "What a loss now would cost" in html

    # --- a flush: the newest save that both nodes have in memory; the only one that the script persists is behind it
    first.until_status(
        lambda now: now["nodes"] and all(_step(node, "memory") > 5 for node in now["nodes"]), "both hold a newer save"
    )
    token = first.address["token"]
    for wrong in ("", "wrong", token[:-1], second.address["token"]):
        assert first.ask("/flush", token=wrong)[0] == 403
        assert first.ask("/stop", token=wrong)[0] == 403
    code, text = first.ask("/flush", token=token)
    outcome = json.loads(text)["directories"][str(tmp_path / "run")]
    assert code == 200 and outcome["outcome"] == "begun", outcome
    first.until_status(
        lambda now: now["nodes"] and all(_step(node, "storage") >= outcome["step"] for node in now["nodes"]),
        "it is durable",
    )

    # --- a failure: each answer is whole, and all of it is seen
    (tmp_path / "kill").touch()
    states = set[str]()
    after = first.until_status(
        lambda now: states.add(now["job"]["state"]) or (trains(now, restarts=1) and now["failures"]),
        "the job fails and resumes",
    )
    assert states > {"trains"}, states
    names = [event["event"] for event in after["events"]]
    assert "resumed" in names and "workers_started" in names
    parts = json.loads(first.ask("/live")[1])["parts"]
    assert "rank 1 died: SIGKILL" in parts["events"] + parts["failures"]

    # --- the same in a terminal, which finds the page by the directory
    said = CliRunner().invoke(main, ["top", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert said.output.startswith("train.py trains on 2 nodes") and "if a node is lost" in said.output
    document = json.loads(CliRunner().invoke(main, ["top", first.url, "--json"]).stdout)
    assert document["job"]["state"] == "trains" and document["url"] == first.url

    # --- a stop with a flush: asked for by two at once, and all nodes end as by a signal
    reached = min(worker["step"] for worker in workers(document))
    answers = [json.loads(first.ask("/stop", token=token)[1]) for _ in range(2)]
    assert [answer["nodes"] for answer in answers] == [[0, 1], [0, 1]]
    codes = [agent.ends() for agent in agents]
    assert all("stopped by SIGTERM" in agent.text() for agent in agents), [agent.text() for agent in agents]
    assert codes == [1, 1]
    newest = max(stored.id.step for stored in CheckpointDirectory(tmp_path / "run").checkpoints())
    assert newest >= reached - reached % 5
    said = CliRunner().invoke(main, ["top", str(tmp_path / "run")])
    assert said.exit_code == 2 and "has ended: stopped" in said.stderr
    said = CliRunner().invoke(main, ["top", document["url"]])
    assert said.exit_code == 2 and "does not answer" in said.stderr
    assert all(agent.text().count("refused an action on the live page") == (agent is first) for agent in agents)


def _step(node: dict, tier: str) -> int:
    return max((tiers[tier]["step"] or 0 for tiers in node.get("tiers", ())), default=0)
