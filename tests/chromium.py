"""The headless Chromium of the tests that look at pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Nothing may leave the machine, not even Chromium's own housekeeping.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# Not for the session: while Playwright is up, its loop counts as running, and asyncio.run refuses in other tests.
@pytest.fixture(scope="module")
def browser() -> Iterator:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()
