"""Runs in: both. All names of torch that are private: a new release can break these files only."""
