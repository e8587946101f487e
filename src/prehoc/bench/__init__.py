"""Benchmarks whose numbers can be trusted: interleaved rounds, medians, dense at its best beside every row."""
