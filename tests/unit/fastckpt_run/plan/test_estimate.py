"""Estimates as tables: the shape of a job, and which source of a number counts."""

from dataclasses import replace

import pytest

from fastckpt._core.inspect.checkpoint_files import CheckpointFiles
from fastckpt._core.inspect.checkpoint_sizes import CheckpointSizes
from fastckpt._core.inspect.saved_profile import SavedProfile
from fastckpt._core.policy.frequency.intervals import Intervals
from fastckpt._core.policy.frequency.profiling import Profile
from fastckpt._core.policy.frequency.requested import RequestedIntervals
from fastckpt._core.policy.resource_plan import Role, SavedFile
from fastckpt._core.report.measured_costs import MeasuredCosts
from fastckpt.errors import ConfigError
from fastckpt_run.plan.estimate import Observed, PlanOptions, estimate

MB = 1_000_000
FILES = [SavedFile("model.pt", 100 * MB, Role.NODE), *(SavedFile(f"rank_{i}.pt", MB, Role.RANK, i) for i in range(6))]
SIZES = CheckpointSizes(CheckpointFiles("run", {}), FILES, 6, None)
LOGS = MeasuredCosts(
    **{"step": 0.5, "steps": 100, "snapshot": 0.02, "saves": 20, "persists": ((106 * MB, 0.4),), "decided": None},
    **{"restart": 2.0, "restarts": 3, "start": 9.0, "failures": 3, "observed": 3600.0},
)
PROFILE = SavedProfile(Profile(0.4, 0.01, 0.3, slowdown=0.04, copy_slowdown=0.005), Intervals(4, 12), 0.035)
SEEN = Observed(free=1 << 40, total=1 << 40)


SHAPES = [
    ({}, None, (1, 6)),
    ({}, 3, (3, 2)),
    ({}, 4, (1, 6)),  # nodes that came and went: 6 ranks were never on 4
    ({"nodes": 2}, 3, (2, 3)),
    ({"ranks_per_node": 2}, None, (3, 2)),
    ({"world_size": 8}, 3, (1, 8)),
    ({"world_size": 8, "nodes": 2}, None, (2, 4)),
    ({"nodes": 2, "ranks_per_node": 8}, None, (2, 8)),
]


def test_the_shape_of_a_job_is_that_of_options_then_logs_and_a_product():
    for options, nodes_of_logs, shape in SHAPES:
        found = estimate(SIZES, replace(SEEN, nodes=nodes_of_logs), PlanOptions(**options))
        assert (found.shape.nodes, found.shape.ranks_per_node) == shape, options
        assert found.node.images == (100 + shape[1]) * MB
    for options in ({"nodes": 4}, {"nodes": 2, "ranks_per_node": 2, "world_size": 6}):
        with pytest.raises(ConfigError, match="do not go together"):
            estimate(SIZES, SEEN, PlanOptions(**options))


def test_options_count_before_logs_before_the_profile_whose_intervals_are_those_of_the_same_job_alone():
    by_profile = estimate(SIZES, replace(SEEN, profile=PROFILE), PlanOptions())
    assert (by_profile.step.value, by_profile.snapshot.value) == (0.4, pytest.approx(0.015))
    assert by_profile.persist.value == pytest.approx(0.3) and by_profile.restart.value is None
    assert (by_profile.intervals, by_profile.goodput) == (Intervals(4, 12), None)
    by_logs = estimate(SIZES, replace(SEEN, profile=PROFILE, costs=LOGS, nodes=1), PlanOptions())
    assert [each.value for each in (by_logs.step, by_logs.snapshot, by_logs.restart)] == [0.5, 0.02, 2.0]
    assert by_logs.persist.value == pytest.approx(0.4) and by_logs.mtbf.value == 1200
    assert by_logs.goodput is not None and 0.9 < by_logs.goodput.memory < by_logs.goodput.without
    given = PlanOptions(step=1.0, snapshot=0.0, restart=5.0, persist_rate=106e6, mtbf=100.0)
    by_options = estimate(SIZES, replace(SEEN, costs=LOGS, nodes=1), given)
    assert [each.value for each in (by_options.step, by_options.snapshot, by_options.restart)] == [1.0, 0.0, 5.0]
    assert by_options.persist.value == pytest.approx(1.0) and by_options.mtbf.value == 100
    seen = replace(SEEN, profile=PROFILE)
    others = estimate(SIZES, seen, PlanOptions(world_size=12, nodes=1))
    assert others.intervals != Intervals(4, 12) and "policy" in others.intervals_source
    asked = estimate(SIZES, seen, PlanOptions(every=RequestedIntervals(3, 30)))
    assert asked.intervals == Intervals(3, 30)
    overhead = estimate(SIZES, seen, PlanOptions(overhead=0.2))
    assert overhead.intervals is not None and overhead.intervals.memory < 4
