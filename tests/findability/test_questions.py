"""Questions that a newcomer asks of the tree, each with the files that answer it: guess them from `find` alone."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (Path(__file__).parent / "questions.tsv").read_text().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_files_that_answer_a_question_exist(line: str) -> None:
    question, _, answers = line.partition("\t")
    assert question.endswith("?") and answers
    assert all((ROOT / answer).is_file() for answer in answers.split())
