"""A link on which transfers never overlap."""

from __future__ import annotations

from engine.offload.links import Link


class OneByOne(Link):
    """One worker, so that the order on the link is certain; several chunks an expert."""

    label = "test"
    bytes_per_s = 1e9

    def _chunk_nbytes(self) -> int:
        return 1024
