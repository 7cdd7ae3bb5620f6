"""The setting of a script's checkpoint directory, by its source: found, or refused with the reason."""

import ast

import pytest

from fastckpt.errors import ConfigError
from fastckpt_run.proof.directory_setting import DirectorySetting, find_setting
from fastckpt_run.script_analysis import Script

ARGPARSE = "p.add_argument('--out-dir', dest='where'); p.add_argument('--lr'); a = p.parse_args()\n"
FOUND = (
    "DdpCheckpointer(a.where)",
    "x = Path(a.where) / 'ckpt'\nDdpCheckpointer(str(x))",
    "Checkpointer(model, opt, checkpoint_dir=a.where)",
    "DdpCheckpointer('/fixed' if a.lr else a.where)",
    "StorageWriter(f'{a.where}/x')",
)
DIRECTORY = "/runs/new"


def setting(source: str) -> DirectorySetting:
    return find_setting(Script(tree=ast.parse(source)), "train.py")


@pytest.mark.parametrize("source", FOUND)
def test_an_argument_that_reaches_the_checkpointer_is_found(source):
    found = setting(ARGPARSE + source)
    assert found == DirectorySetting(argument="--out-dir") and str(found) == "the argument --out-dir"


@pytest.mark.parametrize("source", ["os.environ['RUN']", "os.environ.get('RUN', 'x')", "Path(getenv('RUN')) / 'a'"])
def test_a_variable_that_reaches_the_checkpointer_is_found(source):
    found = setting(f"where = {source}\nDdpCheckpointer(where)")
    assert found == DirectorySetting(variable="RUN") and found.environment(DIRECTORY) == {"RUN": DIRECTORY}
    assert found.arguments(["--a"], DIRECTORY) == ["--a"] and DirectorySetting("--x").environment(DIRECTORY) == {}


def test_a_positional_argument_is_found_by_its_place():
    assert setting("DdpCheckpointer(sys.argv[2])") == DirectorySetting(argument="2")
    source = "p.add_argument('data'); p.add_argument('--lr'); p.add_argument('out'); a = p.parse_args()\n"
    assert setting(source + "DdpCheckpointer(a.out)") == DirectorySetting(argument="2")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("DdpCheckpointer('/runs/a')", "written in the source, as '/runs/a' in line 1"),
        ("HERE = '/runs/a'\nDdpCheckpointer(HERE)", "written in the source, as '/runs/a' in line 1"),
        ("DdpCheckpointer(cfg.out)", "gives its checkpointer a directory of unknown origin"),
        ("print(1)", "makes no checkpointer of fastckpt"),
    ],
)
def test_a_directory_that_cannot_be_set_is_refused_with_what_to_do(source, why):
    with pytest.raises(ConfigError, match=why) as error:
        setting(source)
    assert "--dir-argument --out, or --dir-variable NAME" in str(error.value)


@pytest.mark.parametrize(
    ("argument", "given", "made"),
    [
        ("--out", ["--lr", "3", "--out", "old", "--steps=4"], ["--lr", "3", "--steps=4", "--out", DIRECTORY]),
        ("--out", ["--out=old=er", "--x"], ["--x", "--out", DIRECTORY]),
        ("--out", [], ["--out", DIRECTORY]),
        ("--out", ["--outer", "y"], ["--outer", "y", "--out", DIRECTORY]),
        ("out=", ["lr=3", "out=old"], ["lr=3", f"out={DIRECTORY}"]),
        ("2", ["data", "old", "more"], ["data", DIRECTORY, "more"]),
        ("2", ["data"], ["data", DIRECTORY]),
    ],
)
def test_the_directory_replaces_what_the_arguments_say_of_it(argument, given, made):
    assert DirectorySetting(argument).arguments(given, DIRECTORY) == made


def test_what_cannot_be_found_or_set_is_refused():
    with pytest.raises(ConfigError, match=r"the source of train\.py cannot be read"):
        find_setting(Script(), "train.py")
    with pytest.raises(ConfigError, match="the script's directory is argument 3, and it was given 1"):
        DirectorySetting("3").arguments(["data"], DIRECTORY)
