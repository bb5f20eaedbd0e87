"""Sparse upcycling (arXiv 2212.05055) without training: a small dense model becomes a Mixtral."""
