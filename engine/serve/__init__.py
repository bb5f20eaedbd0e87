"""Serving: runs with their events, knobs and stop flags, in this process or over a network."""
