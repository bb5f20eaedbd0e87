"""How a limit on fast memory is shared out between a draft and the expert cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.config import CacheBudget, EngineConfig
from engine.doctor import fast_memory


@dataclass(frozen=True)
class Split:
    """Experts that the cache may hold, of all layers together: `slots` beside the draft, `limit_slots` without one.

    `expert_bytes` are those of all experts, `slot_bytes` of one.
    """

    layers: int
    slots: int
    limit_slots: int
    slot_bytes: int
    expert_bytes: int

    @property
    def budget(self) -> CacheBudget:
        """The cache beside the draft."""
        return CacheBudget(nbytes=self.slots * self.slot_bytes)


def split_memory(config: EngineConfig, draft: str, share: float) -> Split:
    """What remains of `share` of the experts' bytes once `draft` is paid for (`slots` is negative if nothing does)."""
    plan = fast_memory(dataclasses.replace(config, draft=draft))
    layers, total = plan["moe_layers"], plan["all_experts_bytes"]
    slot = total // (layers * plan["experts"])
    limit = int(share * total)
    return Split(layers, (limit - plan["memory"]["draft"]) // slot, limit // slot, slot, total)
