"""The best settings by prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.errors import UsageError
from engine.tune.prediction import Prediction
from engine.tune.setting import Setting


def search(
    settings: Iterable[Setting], predict: Callable[[Setting], Prediction], known: Callable[[Setting], bool]
) -> list[Prediction]:
    """All settings that can be predicted, the one of most tokens/s first; of equals, the one that was named first.

    Raises UsageError when there is none.
    """
    found = [predict(setting) for setting in settings if known(setting)]
    if not found:
        raise UsageError("nothing was measured that says how fast any setting is: give more --seconds")
    return sorted(found, key=lambda prediction: -prediction.rate)


def finalists(ranked: list[Prediction], count: int) -> list[Prediction]:
    """The best `count`, of which each is the best of its draft, prefetch and batch.

    Neighbours in k differ by less than a short run can tell; drafts do not.
    """
    seen: set[tuple[str, str, int]] = set()
    chosen = []
    for prediction in ranked:
        setting = prediction.setting
        kind = (setting.draft, setting.prefetch, setting.batch)
        if kind not in seen:
            seen.add(kind)
            chosen.append(prediction)
    return chosen[:count]
