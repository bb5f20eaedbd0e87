"""Experts in a slow tier, a cache of them in fast memory, and the link between."""

from __future__ import annotations

from engine.config import LinkConfig
from engine.errors import UsageError
from engine.model.layout import ExpertTable
from engine.offload.disk import DiskLink
from engine.offload.emulated import EmulatedLink
from engine.offload.links import Link
from engine.offload.source import ExpertSource


def create_link(config: LinkConfig, table: ExpertTable) -> Link:
    """The link that `config` asks for, reading the experts of `table`.

    Raises UsageError for an emulated link without a bandwidth (resolve its preset first), CheckpointError when a
    file of `table` is missing or cut off.
    """
    if config.kind == "disk":
        return DiskLink(ExpertSource(table))
    if config.gbps is None:
        raise UsageError(f"the bandwidth of link preset {config.preset!r} is not known")
    # The pace is set, so the page cache may help to keep it.
    return EmulatedLink(ExpertSource(table, direct=False), config.gbps, config.latency_us, config.preset)


__all__ = ["DiskLink", "EmulatedLink", "ExpertSource", "Link", "create_link"]
