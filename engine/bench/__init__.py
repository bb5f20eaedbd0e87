"""Measurements, both sides in one run: `python -m engine bench`."""
