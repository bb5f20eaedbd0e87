"""By how much a network makes what is shown older than it has to be."""

from __future__ import annotations

#: Less than this nobody sees, and batches and busy machines cause as much.
NOTICEABLE_S = 0.5


class Lag:
    """Compares the run's clock with ours as events arrive.

    The clocks differ by an unknown constant, which includes the network's shortest delay. So the quickest arrival
    counts as no lag at all, and what later ones took longer is what waited somewhere on the way.
    """

    def __init__(self) -> None:
        self._offset_s: float | None = None
        self.behind_s = 0.0

    def arrived(self, t_ns: int, now_s: float) -> float:
        """Note that what happened at `t_ns` of the run is known at `now_s` of our clock; seconds behind."""
        offset = now_s - t_ns / 1e9
        self._offset_s = offset if self._offset_s is None else min(self._offset_s, offset)
        self.behind_s = offset - self._offset_s
        return self.behind_s

    @property
    def noticeable(self) -> bool:
        return self.behind_s >= NOTICEABLE_S
