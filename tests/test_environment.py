"""The environment that `make test` makes: what constraints.txt pins, within the ranges that pyproject.toml allows."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = [*PROJECT["dependencies"], *(need for extra in EXTRAS.values() for need in extra)]


def test_what_is_tested_with_is_pinned_installed_and_within_what_is_allowed():
    for needed in NEEDED:
        requirement = Requirement(needed)
        if requirement.name != "fastckpt-run":
            pinned, installed = PINNED[requirement.name], metadata.version(requirement.name)
            assert Version(installed).public == pinned, needed
            assert requirement.specifier.contains(pinned), needed


def test_an_installed_package_has_all_files_that_are_no_modules():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("fastckpt", "fastckpt_run"):
        files = {path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert files == {path for pattern in patterns[package] for path in (ROOT / package).glob(pattern)}


def test_commands_that_install_name_what_exists():
    texts = [path for pattern in ("*.md", "docs/*.md", "fastckpt*/**/*.py") for path in ROOT.glob(pattern)]
    commands = [line for path in texts for line in re.findall(r"pip install ([^`\n]+)", path.read_text())]
    quoted = {need for line in commands for need in re.findall(r"'([^'{]+)'", line)}
    own = {need for need in quoted if need.startswith(".[")}
    assert quoted - own <= set(NEEDED)
    assert {extra for need in own for extra in need[2:-1].split(",")} <= EXTRAS.keys()
    assert not [line for line in commands if re.search(r"\bfastckpt\b", line)], "is another project's name"
