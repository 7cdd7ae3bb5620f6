"""Runs in: both. File operations: copies at the rate of the device, what outlives a crash."""
