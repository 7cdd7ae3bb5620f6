"""Draws the loss of a host: the steps of a job on two hosts, of which the one with the store is lost and replaced.

    python benchmarks/node_loss.py [--picture docs/images/node_loss.png]

Hosts are namespaces of this machine, which needs root (tests/nodes/hosts.py); the job is tests/nodes/train.py, whose
saves go to memory alone. The losses of all steps are those of a run that nothing befell, or the picture is not drawn.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.nodes.hosts import Cluster, name_of, obstacle
from tests.nodes.job import NodesJob, endpoint
from tests.nodes.recovery import Line
from tests.nodes.reference import losses_in, train_uninterrupted

HOSTS = (0, 1)
LOST = 0
STEPS = 80
MEMORY_ONLY = ("--disk", "100000")
ENDLESS, ENOUGH = ("--steps", "100000"), ("--steps", "3000")
TWO_BATCHES = ("--batches", "2")
"""Has one rank do, bit for bit, what two do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if why := obstacle():
        print(f"no hosts can be made here: {why}", file=sys.stderr)
        return 1
    script = (*TWO_BATCHES, *MEMORY_ONLY)
    with tempfile.TemporaryDirectory(prefix="fastckpt-node-loss-") as made:
        folder, reference = Path(made) / "job", Path(made) / "reference"
        with Cluster(folder, *HOSTS) as cluster:
            job = NodesJob(cluster, *script, *ENDLESS, nodes="1:2", meeting=endpoint(*HOSTS))
            job.launch(*HOSTS)
            job.do_steps(STEPS)
            lost = job.lose(LOST)
            survived = job.recovered(lost)
            job.do_steps(STEPS)
            cluster.add(LOST)
            launched = job.launch(LOST)
            joined = job.recovered(launched)
            job.do_steps(STEPS)
            job.end()
            logs = {number: job.lines(number) for number in HOSTS}
        reference.mkdir()
        train_uninterrupted(reference, 1, *script, *ENOUGH)
        right = losses_in(reference)
        wrong = [key for key, values in losses_in(folder).items() if values != right[key]]
    print(f"host lost: {survived.seconds:.2f} s until the other one goes on, {survived.lost} steps repeated")
    print(f"fresh host: {joined.seconds:.2f} s from its start, {joined.lost} steps repeated, from {joined.tiers}")
    still = max(joined.still[number] for number in HOSTS if number != LOST)
    print(f"the survivor stood still {still:.2f} s for it; {len(wrong)} losses are wrong")
    if options.picture and not wrong:
        draw(logs, lost, launched, options.picture)
    return bool(wrong)


def draw(logs: dict[int, list[Line]], lost: float, launched: float, path: Path) -> None:
    """Steps over time, a panel for each host."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    begin = lost - 3.0
    figure, panels = pyplot.subplots(len(logs), 1, figsize=(9, 1.3 * len(logs) + 0.6), sharex=True, sharey=True)
    for panel, (number, lines) in zip(panels, logs.items(), strict=True):
        steps = [line for line in lines if line["what"] == "step" and line["at"] > begin]
        panel.plot([line["at"] - begin for line in steps], [line["step"] for line in steps], ".", markersize=3)
        for line in lines:
            if line["what"] == "loaded" and line["at"] > begin:
                panel.axvline(line["at"] - begin, color="tab:green", linewidth=1)
                panel.text(
                    line["at"] - begin, steps[-1]["step"], f" {line['tier']}, step {line['step']}", fontsize=7, va="top"
                )
        panel.axvline(lost - begin, color="tab:red", linewidth=1)
        panel.axvline(launched - begin, color="tab:grey", linewidth=1, linestyle="--")
        panel.set_title(
            name_of(number) + (": holds the store; lost with its memory" if number == LOST else ""),
            fontsize=9,
            loc="left",
        )
        panel.set_ylabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
    panels[-1].set_xlabel(
        "seconds; red: the host is lost, grey: a fresh one starts its agent, green: workers have resumed", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
