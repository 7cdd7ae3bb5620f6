"""The setting of a script's checkpoint directory, by its source: found, or refused with the reason."""

import ast

import pytest

from fastckpt.errors import ConfigError
from fastckpt_run.proof.directory_setting import DirectorySetting, find_setting
from fastckpt_run.script_analysis import Script
from tests.support.tables import for_each

NAMED = "p.add_argument('--out-dir', dest='where'); p.add_argument('--lr'); a = p.parse_args()\n"
PLACED = "p.add_argument('data'); p.add_argument('--lr'); p.add_argument('out'); a = p.parse_args()\n"
ARGUMENT, VARIABLE, SECOND = DirectorySetting("--out-dir"), DirectorySetting(variable="RUN"), DirectorySetting("2")
FOUND = {
    f"{NAMED}DdpCheckpointer(a.where)": ARGUMENT,
    f"{NAMED}x = Path(a.where) / 'ckpt'\nDdpCheckpointer(str(x))": ARGUMENT,
    f"{NAMED}Checkpointer(model, opt, checkpoint_dir=a.where)": ARGUMENT,
    f"{NAMED}DdpCheckpointer('/fixed' if a.lr else a.where)": ARGUMENT,
    f"{NAMED}StorageWriter(f'{{a.where}}/x')": ARGUMENT,
    "where = os.environ['RUN']\nDdpCheckpointer(where)": VARIABLE,
    "where = os.environ.get('RUN', 'x')\nDdpCheckpointer(where)": VARIABLE,
    "where = Path(getenv('RUN')) / 'a'\nDdpCheckpointer(where)": VARIABLE,
    "DdpCheckpointer(sys.argv[2])": SECOND,
    f"{PLACED}DdpCheckpointer(a.out)": SECOND,
}
DIRECTORY = "/runs/new"


def setting(source: str) -> DirectorySetting:
    return find_setting(Script(tree=ast.parse(source)), "train.py")


def test_an_argument_or_variable_that_reaches_the_checkpointer_is_found():
    assert {source: setting(source) for source in FOUND} == FOUND
    assert str(ARGUMENT) == "the argument --out-dir" and ARGUMENT.environment(DIRECTORY) == {}
    assert VARIABLE.environment(DIRECTORY) == {"RUN": DIRECTORY} and VARIABLE.arguments(["--a"], DIRECTORY) == ["--a"]


@for_each(
    ("DdpCheckpointer('/runs/a')", "written in the source, as '/runs/a' in line 1"),
    ("HERE = '/runs/a'\nDdpCheckpointer(HERE)", "written in the source, as '/runs/a' in line 1"),
    ("DdpCheckpointer(cfg.out)", "gives its checkpointer a directory of unknown origin"),
    ("print(1)", "makes no checkpointer of fastckpt"),
)
def test_a_directory_that_cannot_be_set_is_refused_with_what_to_do(source, why):
    with pytest.raises(ConfigError, match=why) as error:
        setting(source)
    assert "--dir-argument --out, or --dir-variable NAME" in str(error.value)


@for_each(
    ("--out", ["--lr", "3", "--out", "old", "--steps=4"], ["--lr", "3", "--steps=4", "--out", DIRECTORY]),
    ("--out", ["--out=old=er", "--x"], ["--x", "--out", DIRECTORY]),
    ("--out", [], ["--out", DIRECTORY]),
    ("--out", ["--outer", "y"], ["--outer", "y", "--out", DIRECTORY]),
    ("out=", ["lr=3", "out=old"], ["lr=3", f"out={DIRECTORY}"]),
    ("2", ["data", "old", "more"], ["data", DIRECTORY, "more"]),
    ("2", ["data"], ["data", DIRECTORY]),
)
def test_the_directory_replaces_what_the_arguments_say_of_it(argument, given, made):
    assert DirectorySetting(argument).arguments(given, DIRECTORY) == made


def test_what_cannot_be_found_or_set_is_refused():
    with pytest.raises(ConfigError, match=r"the source of train\.py cannot be read"):
        find_setting(Script(), "train.py")
    with pytest.raises(ConfigError, match="the script's directory is argument 3, and it was given 1"):
        DirectorySetting("3").arguments(["data"], DIRECTORY)
