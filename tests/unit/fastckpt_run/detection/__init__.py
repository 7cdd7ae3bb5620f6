"""Tests of the watch over other nodes."""
