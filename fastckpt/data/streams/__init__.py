"""Streams: iterable data sets, whole or sharded among loader workers, and the trial of their repeatability."""
