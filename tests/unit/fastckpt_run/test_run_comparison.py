"""Comparison of what two runs have logged: by steps, ranks and executions; and what speaks for a missing resume."""

import ast
import json
import math
from pathlib import Path
from typing import Any

from fastckpt_run.proof.likely_causes import (
    BACKGROUND,
    FILE,
    GENERATOR,
    HASH,
    IGNORED,
    RESUME,
    causes_of_variation,
    not_resumed,
    varies_by_itself,
)
from fastckpt_run.proof.run_comparison import RunComparison, compare_runs
from fastckpt_run.proof.run_history import RunHistory, read_history

SAVES = (2, 4, 6)


def lines(first: int, last: int, loss: float = 1.0, **changed: float) -> list[dict[str, Any]]:
    """Steps that log ``loss`` plus the step, and are saved if that is their turn; some log another value."""
    found = list[dict[str, Any]]()
    for step in range(first, last + 1):
        value = changed.get(f"at_{step}", loss + step)
        found.append({"what": "logged", "step": step, "values": {"loss": value.hex()}})
        if step in SAVES:
            found.append({"what": "saved", "step": step})
    return found


def history(folder: Path, name: str, *starts: list[dict[str, Any]]) -> RunHistory:
    place = folder / name
    place.mkdir(parents=True)
    begun = {"what": "begun", "step": -1, "restart": 0}
    text = "".join(json.dumps(line) + "\n" for start in starts for line in (begun, *start))
    (place / "rank-0.jsonl").write_text(text + '{"what": "logged", "st')  # it was killed while it wrote
    return read_history(place)


def loaded(step: int) -> list[dict[str, Any]]:
    return [{"what": "loaded", "step": step, "tier": "memory"}]


def compared(folder: Path, *starts: list[dict[str, Any]], plain: list[dict[str, Any]] | None = None) -> RunComparison:
    a = history(folder, "plain", lines(1, 6) if plain is None else plain)
    return compare_runs(a, history(folder, "killed", *starts), (folder, folder), str(folder))


def test_the_last_executions_of_steps_are_compared_and_earlier_ones_must_equal_them(tmp_path):
    found = compared(tmp_path / "alike", lines(1, 3), loaded(2) + lines(3, 5), loaded(4) + lines(5, 6))
    assert found.equal and (found.values, found.repeats, found.differing) == (6, 2, 0)
    found = compared(tmp_path, lines(1, 3), loaded(2) + lines(3, 6, at_5=0.5, at_6=0.25))
    assert found.value is not None and (found.value.of.step, found.value.a, found.value.b) == (5, 6.0, 0.5)
    assert found.value.start is not None and found.value.start.loaded == 2 and found.differing == 2
    found = compared(tmp_path / "repeated", lines(1, 4, at_4=9.0), loaded(2) + lines(3, 6))
    assert found.value is not None and found.value.repeated and found.value.of == (4, 0, "loss")
    assert (found.value.a, found.value.b, found.differing) == (9.0, 5.0, 1)


def test_values_are_compared_as_they_are_and_a_step_that_one_run_alone_has_is_a_difference(tmp_path):
    for value in (math.nan, math.inf, -math.inf, -0.0):
        one, other = lines(1, 6, at_3=value), lines(1, 6, at_3=0.0)
        assert compared(tmp_path / f"same {value}", one, plain=one).equal
        found = compared(tmp_path / f"other {value}", one, plain=other)
        assert found.value is not None and found.value.of.step == 3
    for missing in (3, 6):
        found = compared(tmp_path / str(missing), [line for line in lines(1, 6) if line["step"] != missing])
        assert found.value is not None and (found.value.of.step, found.value.b) == (missing, None)


def test_a_difference_before_any_kill_is_the_scripts_own(tmp_path):
    early = [lines(1, 3, at_2=0.5), loaded(2) + lines(3, 6)]
    late = [lines(1, 3), loaded(2) + lines(3, 6, at_4=0.5)]
    a = history(tmp_path, "plain", lines(1, 6))
    for name, starts in (("early", early), ("late", late)):
        killed = history(tmp_path, name, *starts)
        found = compare_runs(a, killed, (tmp_path, tmp_path), str(tmp_path))
        assert varies_by_itself(found, killed) is (name == "early")


def test_a_start_that_does_not_go_on_is_named(tmp_path):
    for second, cause, why in (
        (loaded(2) + lines(3, 6), "", ""),
        ([{"what": "fresh", "step": -1}, *lines(1, 6)], RESUME, "asked for a checkpoint and found none"),
        (lines(1, 6), RESUME, "began at step 1 without a checkpoint, though step 2"),
        (loaded(2) + lines(1, 6), IGNORED, "loaded step 2 and went on at step 1"),
    ):
        found = not_resumed(history(tmp_path, f"killed {why}", lines(1, 3), second))
        assert (found.name if found else "") == cause and (found is None or why in found.text)


COUNTS = "n = open('count').read()\nopen('count', 'w').write(n)"


def test_causes_by_which_any_two_runs_differ_are_named_by_the_source():
    for source, cause, words in (
        ("for word in {'a', 'b'}: print(word)", HASH, "line 1"),
        ("x = hash('a')", HASH, "line 1"),
        (COUNTS, FILE, "writes a file (line 2), and reads one (line 1)"),
    ):
        first, second, *others = causes_of_variation("why", ast.parse(source))
        assert (first.name, second.name) == (BACKGROUND, cause) and words in second.text
        assert {HASH, FILE, GENERATOR} <= {second.name, *(each.name for each in others)}
