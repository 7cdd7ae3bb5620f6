"""Runs in: both. File operations: copies at the rate of the device, files that outlive a crash."""
