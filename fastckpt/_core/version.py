"""The version of this library, which pyproject.toml takes from here: the same installed and in a checkout."""

VERSION = "0.5.0"
