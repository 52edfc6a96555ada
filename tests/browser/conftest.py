"""A real browser: Debian's chromium driven by playwright. Without it these tests are skipped, under CI they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SCREENSHOTS = Path(__file__).parents[2] / "screenshots"


def _missing(what: str) -> NoReturn:
    message = f"the tests in a browser need {what}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, from WHYFORMER_CHROMIUM or the path."""
    chromium = os.environ.get("WHYFORMER_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        _missing("chromium (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright (pip install whyformer[browser])")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page of its own profile. ``page.requested``: addresses asked for; ``page.complaints``: what its console says."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = context.new_page()
    made.requested, made.complaints = [], []
    made.on("request", lambda request: made.requested.append(request.url))
    made.on("console", lambda message: made.complaints.append(message.text) if message.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: made.complaints.append(str(error)))
    yield made
    context.close()


@pytest.fixture
def screenshots() -> Path:
    """Where pictures of pages are kept to be looked at; git does not see it."""
    SCREENSHOTS.mkdir(exist_ok=True)
    return SCREENSHOTS
