"""Benchmarks: `make bench`, or `python -m benchmarks [PART ...]`; see docs/benchmarks.md for the method."""
