"""Who guesses the next tokens: one class a file, and the factory that knows their names."""

from __future__ import annotations

from engine.errors import UsageError
from engine.model.draft_model import DraftModel
from engine.model.runner import ModelRunner
from engine.offload.experts import QuantizedExperts
from engine.offload.resident import ResidentExperts
from engine.speculation.drafters.base import Draft, Drafter, DraftRun, NoDrafter
from engine.speculation.drafters.model import ModelDrafter
from engine.speculation.drafters.ngram import NgramDrafter
from engine.speculation.drafters.self_draft import SelfDrafter

__all__ = [
    "Draft",
    "DraftRun",
    "Drafter",
    "NoDrafter",
    "SelfDrafter",
    "create_drafter",
    "self_draft_bits",
    "sparse_experts",
]

_BITS = {"self-int8": 8, "self-int4": 4, "self-int3": 3, "self-int2": 2}
_RESIDENT = {"sparse": 2, "sparse-1": 1}


def self_draft_bits(kind: str) -> int | None:
    """The precision of a draft that is a quantized copy of the experts; None for all others."""
    return _BITS.get(kind)


def sparse_experts(kind: str) -> int | None:
    """How many resident experts a token takes in a draft that has no experts of its own; None for all others."""
    return _RESIDENT.get(kind)


def create_drafter(
    kind: str,
    runner: ModelRunner,
    experts: QuantizedExperts | ResidentExperts | None,
    model: DraftModel | None,
    run: DraftRun,
) -> Drafter:
    """The drafter of one run. `experts` are those that the target drafts with, `model` the one that drafts for it;
    whoever loads the target has what its kind of draft needs. Raises UsageError for an unknown kind.
    """
    if model is not None:
        return ModelDrafter(model, run)
    if kind in _BITS or kind in _RESIDENT:
        assert experts is not None
        return SelfDrafter(runner, experts, run)
    if kind == "ngram":
        return NgramDrafter()
    if kind == "none":
        return NoDrafter()
    raise UsageError(f"unknown draft {kind!r}")
