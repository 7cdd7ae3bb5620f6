"""The table of all metrics of a job: source of the endpoint, TensorBoard's tags, events, docs/reference/metrics.md.

Names follow OpenMetrics (https://prometheus.io/docs/specs/om/open_metrics_spec): the unit is the suffix of a name, and
counters end with ``_total``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from fastckpt._core.policy.slots import SkipKind
from fastckpt._core.report.goodput import CAUSES, USEFUL

Labels = tuple[str, ...]
"""The values of a metric's labels, in the order of the table."""


class Kind(Enum):
    """The kind of a metric: a counter never falls while the agent lives; a histogram counts by upper bounds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(Enum):
    """Scope of the values that an agent serves.

    Values of its node add up over nodes; node 0 alone serves those of the job.
    """

    NODE = "each node"
    JOB = "node 0"


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: As it is at the endpoint, with the unit, and ``_total`` of a counter.
        unit: ``seconds``, ``bytes``, ``ratio`` (0 to 1) or ``celsius``; empty for a number of things, or of a step.
        labels: The names of its labels.
        group: Its subject; the first part of its tag in TensorBoard.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    scope: Scope
    group: str

    @property
    def family(self) -> str:
        """The name without ``_total``, as libraries for Prometheus want it."""
        return self.name.removesuffix("_total")

    def tag(self, labels: Labels) -> str:
        """The tag of a value in TensorBoard."""
        return "/".join([self.group, self.name.removeprefix(PREFIX), *labels])

    def key(self, labels: Labels) -> str:
        """The name and the labels of a value in an event ``metrics``, as Prometheus writes them."""
        shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(self.labels, labels, strict=True))
        return f"{self.name}{{{shown}}}" if shown else self.name


def parse_key(key: str) -> tuple[str, dict[str, str]]:
    """The name and the labels, by name, of a result of `Metric.key`; other texts have no labels."""
    name, brace, rest = key.partition("{")
    labels = {match[1]: _UNESCAPE.sub(_unescaped, match[2]) for match in _LABEL.finditer(rest)} if brace else {}
    return name, labels


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNESCAPE = re.compile(r"\\(.)")


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


PREFIX = "fastckpt_"
_UNITS = ("seconds", "bytes", "ratio", "celsius")


def _row(kind: Kind, scope: Scope, group: str, name: str, help: str, *labels: str) -> Metric:
    last = name.removesuffix("_total").rpartition("_")[2]
    return Metric(f"{PREFIX}{name}", kind, last if last in _UNITS else "", help, labels, scope, group)


def _counter(scope: Scope, group: str, name: str, help: str, *labels: str) -> Metric:
    return _row(Kind.COUNTER, scope, group, f"{name}_total", help, *labels)


def _gauge(scope: Scope, group: str, name: str, help: str, *labels: str) -> Metric:
    return _row(Kind.GAUGE, scope, group, name, help, *labels)


_N, _J = Scope.NODE, Scope.JOB

_JOB = (
    _row(Kind.HISTOGRAM, _N, "job", "step_seconds", "Durations of steps of all workers of the node."),
    _gauge(_N, "job", "goodput_ratio", "Useful part of the node's time in this launch."),
    _counter(_N, "job", "useful_seconds", "Useful time of the node in this launch."),
    _counter(
        _N, "job", "lost_seconds", "Lost time of the node in this launch, by cause (docs/reference/events.md).", "cause"
    ),
    _counter(_J, "job", "steps", "Steps done for the first time in this launch."),
    _counter(_J, "job", "repeated_steps", "Steps that were done before, and lost."),
    _gauge(_J, "job", "step", "Newest step of the furthest worker."),
    _gauge(_N, "job", "workers", "Living workers of the node."),
    _gauge(_J, "job", "ranks", "Ranks in the round."),
    _gauge(_J, "job", "nodes", "Nodes in the round."),
    _counter(_J, "job", "restarts", "Starts of workers after the first one of this agent."),
    _gauge(_J, "job", "restarts_left", "Restarts that are left."),
    _counter(
        _N,
        "job",
        "failures",
        "Ends of rounds: a worker `died` or `hung`, or another node failed (`elsewhere`).",
        "kind",
    ),
    _counter(_N, "job", "hangs", "Hangs that were ended by killing workers."),
    _counter(_J, "job", "stragglers", "Findings that a rank is slow, by the slow part of its steps.", "rank", "part"),
    _gauge(_J, "job", "straggler_cost_ratio", "Part of the job's time that a slow rank costs.", "rank", "part"),
    _counter(_N, "job", "events_lost", "Events that could not be written."),
)

_RANKS = (
    _gauge(
        _N,
        "ranks",
        "rank_step_seconds",
        "Mean seconds of a part of a rank's last steps; its own time is all but `wait`.",
        "rank",
        "part",
    ),
    _gauge(_N, "ranks", "rank_silent_seconds", "Seconds since a rank last reported progress.", "rank"),
    _gauge(_N, "ranks", "rank_step", "Newest step of a rank.", "rank"),
)

_CHECKPOINTS = (
    _counter(_J, "checkpoints", "saves", "Saves that became whole in memory of node 0."),
    _counter(_N, "checkpoints", "saved_bytes", "Bytes of saves in memory of the node."),
    _counter(
        _J,
        "checkpoints",
        "skipped_saves",
        "Skipped saves: slots `busy`, a rank `late` or `gone`, `superseded` by another job, memory `unwritable`.",
        "reason",
    ),
    _counter(_J, "checkpoints", "overtaken_saves", "Saves not persisted because newer ones came."),
    _counter(_J, "checkpoints", "persists", "Checkpoints that became durable."),
    _counter(_J, "checkpoints", "persisted_bytes", "Bytes of checkpoints that became durable."),
    _counter(_J, "checkpoints", "persist_seconds", "Duration of persists until they were durable."),
    _counter(_N, "checkpoints", "persist_failures", "Failed attempts to persist."),
    _counter(_J, "checkpoints", "flushes", "Persists after workers died, or the job ended."),
    _counter(_N, "checkpoints", "uploads", "Checkpoints uploaded to the remote tier."),
    _counter(_N, "checkpoints", "uploaded_bytes", "Bytes of uploaded checkpoints."),
    _counter(_N, "checkpoints", "upload_failures", "Failed attempts to upload."),
    _counter(_N, "checkpoints", "replicated_saves", "Saves whose large files were copied to other hosts."),
    _counter(_N, "checkpoints", "replicated_bytes", "Bytes of these files."),
    _counter(_N, "checkpoints", "skipped_replicas", "Saves whose large files could not be copied."),
    _counter(_J, "checkpoints", "resumes", "Resumes of ranks of node 0, by tier.", "source"),
    _counter(_N, "checkpoints", "bad_checkpoints", "Checkpoints that could not be loaded."),
    _gauge(
        _J,
        "checkpoints",
        "newest_step",
        "Step of the newest checkpoint in a tier: `memory`, `storage`, `remote`.",
        "tier",
    ),
    _gauge(
        _J,
        "checkpoints",
        "unsaved_steps",
        "Steps to repeat after a loss of workers (`memory`), all memory (`storage`), or the directory, too (`remote`).",
        "tier",
    ),
    _gauge(_J, "checkpoints", "replicated_step", "Step of the newest save that survives the loss of any one host."),
    _gauge(_J, "checkpoints", "durable_age_seconds", "Seconds since the newest checkpoint became durable."),
    _gauge(_N, "checkpoints", "arena_bytes", "Bytes of the node's arenas."),
)

_NODE = (
    _gauge(_N, "node", "node_processor_ratio", "Busy part of the host's processors."),
    _gauge(_N, "node", "node_memory_bytes", "Memory of the host: `used`, `free`.", "state"),
    _gauge(_N, "node", "node_headroom_bytes", "Bytes that an arena can still take."),
    _gauge(_N, "node", "node_tmpfs_bytes", "File system of the arenas: `used`, `free`.", "state"),
    _gauge(
        _N, "node", "node_disk_bytes", "File system of a checkpoint directory: `used`, `free`.", "directory", "state"
    ),
    _counter(_N, "node", "node_network_bytes", "Bytes `received` and `sent`, without loopback.", "direction"),
    _counter(_N, "agent", "agent_processor_seconds", "Processor time of the agent."),
    _gauge(_N, "agent", "agent_memory_bytes", "Resident memory of the agent, mapped arenas included."),
    _gauge(_N, "gpus", "gpu_utilization_ratio", "Busy part of the GPU's last interval.", "gpu"),
    _gauge(_N, "gpus", "gpu_memory_bytes", "Memory of the GPU: `used`, `free`.", "gpu", "state"),
    _gauge(_N, "gpus", "gpu_temperature_celsius", "Temperature of the GPU.", "gpu"),
)

_USER = (
    _gauge(_N, "user", "user", "Newest value that a rank gave to `fastckpt.metrics.log`.", "name", "rank"),
    _gauge(_N, "user", "user_step", "Step of these values.", "rank"),
)

METRICS = (*_JOB, *_RANKS, *_CHECKPOINTS, *_NODE, *_USER)
BY_NAME = {metric.name: metric for metric in METRICS}

LABEL_VALUES: Mapping[str, tuple[str, ...]] = {
    "cause": tuple(cause for cause in CAUSES if cause != USEFUL),
    "kind": ("died", "hung", "elsewhere"),
    "tier": ("memory", "storage", "remote"),
    "state": ("used", "free"),
    "direction": ("received", "sent"),
    "reason": tuple(SkipKind),
}
"""All values of those labels that have few."""
