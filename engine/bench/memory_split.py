"""How a limit on fast memory is shared out between a draft and the expert cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.config import CacheBudget, EngineConfig
from engine.doctor import fast_memory


@dataclass(frozen=True)
class Split:
    """Experts that the cache may hold, of all layers together: `slots` beside the draft, `limit_slots` without one.

    `expert_bytes` are those of all experts, `stored_bytes` of one: a slot takes up to a page more.
    """

    layers: int
    slots: int
    limit_slots: int
    stored_bytes: int
    expert_bytes: int

    @property
    def budget(self) -> CacheBudget:
        """The cache beside the draft."""
        return CacheBudget(nbytes=self.slots * self.stored_bytes)


def split_memory(config: EngineConfig, draft: str, share: float) -> Split:
    """What remains of `share` of the experts' bytes once `draft` is paid for (`slots` is negative if nothing does)."""
    plan = fast_memory(dataclasses.replace(config, draft=draft, cache=CacheBudget(share=1.0)))
    layers, experts, total = plan["moe_layers"], plan["moe_layers"] * plan["experts"], plan["all_experts_bytes"]
    slot, limit = plan["memory"]["cache"] // experts, int(share * total)
    return Split(layers, (limit - plan["memory"]["draft"]) // slot, limit // slot, total // experts, total)
