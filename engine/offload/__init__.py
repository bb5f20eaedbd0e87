"""Experts in a slow tier, a cache of them in fast memory, and the link between."""
