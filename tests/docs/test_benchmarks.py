"""The page of benchmarks: made from the recorded runs, of modules that are there, by a harness that runs a real job."""

import re
import subprocess
import sys

import pytest

from benchmarks.__main__ import benchmarks
from benchmarks.harness import page
from benchmarks.harness.results import FOLDER, load

KNOWN = benchmarks()


def test_tables_and_pictures_are_those_of_the_recorded_runs():
    text = page.PAGE.read_text()
    assert page.written(text, KNOWN) == text
    for name, svg in page.pictures(KNOWN.values()):
        assert (page.IMAGES / name).read_text() == svg, name


def test_each_benchmark_has_a_section_and_each_result_a_benchmark():
    assert sorted(page.marked(page.PAGE.read_text())) == sorted(KNOWN)
    assert {path.stem for path in FOLDER.glob("*")} <= KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_a_benchmark_asks_a_question_of_contenders_that_it_names(name: str):
    benchmark = KNOWN[name]
    assert benchmark.name == name and benchmark.question.endswith("?") and benchmark.work.endswith(".")
    for run in load(name):
        took_part = {sample["contender"] for sample in run.samples}
        assert took_part and took_part | run.missing.keys() <= {each.name for each in benchmark.contenders}


def test_a_benchmark_runs_by_name():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "later_save", "--quick", "--gigabytes", "0.01"],
        cwd=page.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"\| save : copy \| \**\d", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "no benchmark is called nothing; there are "),
        (["--rounds", "0"], "--rounds is 0; give 1 or more"),
        (["--gigabytes", "-1"], "--gigabytes is -1.0; give more than 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    from benchmarks.__main__ import parsed

    with pytest.raises(SystemExit):
        parsed(arguments)
    assert text in capsys.readouterr().err
