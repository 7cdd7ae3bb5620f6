"""The page on file systems says what the campaign has recorded, and nothing else."""

from tests.file_systems.mounts import FILE_SYSTEMS
from tests.file_systems.table import PAGE, results, table


def test_the_table_of_the_page_is_what_was_recorded() -> None:
    assert {result["name"] for result in results()} == set(FILE_SYSTEMS)
    assert table() + "\n" in PAGE.read_text(), "python -m tests.file_systems.table"
