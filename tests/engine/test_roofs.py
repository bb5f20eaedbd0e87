"""The measured roofs: plausible against each other, and one measurement a machine."""

from __future__ import annotations

import torch

from engine.roofs import READ_BYTES, measure_roofs


def test_roofs_are_measured_once_and_bound_a_smaller_product():
    roofs = measure_roofs("float32", "cpu", torch.get_num_threads())
    assert roofs is measure_roofs("float32", "cpu", torch.get_num_threads())
    assert roofs["read_bytes"] == READ_BYTES
    # A matrix times a vector reads each weight for two operations: no machine does that at its peak.
    ridge = roofs["tflops"] * 1e3 / roofs["memory_gbps"]
    assert 0.5 < ridge < 10_000
