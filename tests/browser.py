"""A real browser for tests of pages: the system's Chromium, driven by playwright, that asks for
nothing of its own.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed here: apt-get install chromium"
)


@contextmanager
def chromium():
    """A playwright browser; pages are made of it."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - 0.3 s that only those tests take that need it

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()
