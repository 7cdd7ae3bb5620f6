"""Forgets the temporary directory that imports have looked up: a process that was forked since may have another."""

import tempfile

tempfile.tempdir = None
