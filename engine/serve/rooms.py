"""Rooms: those who hold a page's watch link see all its runs, one after the other, and change nothing.

A page keeps a secret, its owner's key. The room's name is made of it and cannot be turned back, so whoever knows the
name may watch, and only who knows the key can start a run that the room sees.
"""

from __future__ import annotations

import hashlib
import re
import secrets

KEY = re.compile(r"[\w-]{20,64}")
NAME = re.compile(r"[0-9a-f]{32}")


def new_key() -> str:
    """A key that nobody can guess."""
    return secrets.token_urlsafe(24)


def is_key(text: object) -> bool:
    return isinstance(text, str) and KEY.fullmatch(text) is not None


def is_room(text: object) -> bool:
    return isinstance(text, str) and NAME.fullmatch(text) is not None


def room_of(key: str) -> str:
    """The room's name."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]
