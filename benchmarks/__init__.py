"""Benchmarks: a suite beside limits and peers (`python -m benchmarks`), and scripts of their own."""
