"""What a page must know of a model before it is loaded: how far its sliders go, and whether it chats."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Traits:
    """`limits`: knob → its upper end, where the model sets one. `chat`: it may have a chat template."""

    limits: dict[str, int] = field(default_factory=dict)
    chat: bool = True

    @classmethod
    def of(cls, model: str) -> Traits:
        """Read from the model's files where they are at hand: nothing is fetched."""
        folder = _folder(model)
        return cls() if folder is None else cls(_limits(_json(folder / "config.json")), _has_chat_template(folder))

    @classmethod
    def from_json(cls, record: Any) -> Traits:
        """What `to_json` gave, from another machine; what makes no sense is left out."""
        record = record if isinstance(record, dict) else {}
        limits = record.get("limits")
        return cls(_positive(limits if isinstance(limits, dict) else {}), record.get("chat") is not False)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def _folder(model: str) -> Path | None:
    """A local directory, or where the hub's own cache has the model already."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no id of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _limits(config: dict[str, Any]) -> dict[str, int]:
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    return _positive(
        {
            "slots": experts,
            "prefetch_depth": config.get("num_hidden_layers"),
            "max_new_tokens": config.get("max_position_embeddings"),
        }
    )


def _positive(limits: dict[Any, Any]) -> dict[str, int]:
    return {str(name): limit for name, limit in limits.items() if type(limit) is int and limit > 0}


def _has_chat_template(folder: Path) -> bool:
    return (folder / "chat_template.jinja").is_file() or bool(
        _json(folder / "tokenizer_config.json").get("chat_template")
    )
