"""`fastckpt explain`: the pages of all codes, however a code is written, also from an installed package."""

from pathlib import Path

from fastckpt._core.error_codes import PAGE, read_pages
from tests.test_links import anchors

ROOT = Path(__file__).parents[2]


def test_a_code_has_its_page_and_its_anchor_and_without_one_all_are_listed(fastckpt):
    for written in ("fc_030", " 30 ", "killed by SIGKILL (FC-030, docs/errors.md#fc-030)"):
        assert fastckpt("explain", written).out.startswith("FC-030: ")
    (found,) = fastckpt("explain", "FC-018", "--json").document["codes"]
    assert found["code"] == "FC-018" and found["messages"] == ["quarantined as <place>: <reason>"]
    assert "(FC-017)" in found["cause"]
    path, _, anchor = found["page"].partition("#")
    assert path == PAGE and anchor in anchors(ROOT / path)
    heading, *lines = fastckpt("explain").out.splitlines()
    assert heading.split() == ["CODE", "MESSAGE", "ABOUT"]
    assert [line.split(maxsplit=1) for line in lines] == [[page.code, page.title] for page in read_pages().values()]
    listed = fastckpt("explain", "--json").document["codes"]
    assert listed == [{"code": page.code, "title": page.title} for page in read_pages().values()]


def test_an_unknown_code_is_an_error_that_names_near_ones(fastckpt):
    for written, near in (("FC-130", "FC-030"), ("hang", "such as FC-030")):
        said = fastckpt("explain", written)
        assert said.code == 2 and not said.out and near in said.err and "fastckpt explain lists all" in said.err
        assert said.err.startswith("fastckpt: error: there is no code ")
