"""The few ways in which the engine fails, each with a message that says what to do next."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that a user may see; its text is one clear line."""

    exit_status = 1


class UsageError(EngineError):
    """An option or setting is unknown, malformed or out of range."""

    exit_status = 2


class ModelError(EngineError):
    """The model cannot run here: not an MoE, an unknown layout, a context that is too short."""


class CheckpointError(EngineError):
    """Files of the checkpoint are missing, cut off, or do not hold what the index promises."""


class BudgetError(EngineError):
    """The memory that was allowed does not hold what must fit in it."""


class TransferError(EngineError):
    """The link could not deliver an expert: a read failed or took longer than its timeout."""


class RemoteError(EngineError):
    """The engine on the other machine cannot be reached, refused us, or lost the run."""


class Cancelled(EngineError):
    """The caller asked to stop while something was loading."""


def first_line(error: BaseException) -> str:
    """What another library's exception says, short enough for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """What a person is told: an engine's own message as it is, any other's first line with its type in front."""
    told = first_line(error)
    name = type(error).__name__
    return told if isinstance(error, EngineError) or told == name else f"{name}: {told}"
