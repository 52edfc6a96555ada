"""A real browser: Debian's chromium driven by playwright. Without it these tests are skipped, under CI they fail."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
ROOT = Path(__file__).parents[3]
SCREENSHOTS = ROOT / "screenshots"
AXE = Path(os.environ.get("WHYFORMER_AXE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
PATIENCE = int(os.environ.get("WHYFORMER_PATIENCE", 240_000))
"""Milliseconds: the machine may be busy. Less than HANG, so that what never comes fails as what was waited for."""
LISTENS = "!window.gradio_config || 'ready' in document.documentElement.dataset"
STILL = "document.getAnimations().every((one) => one.playState !== 'running' || one.effect.getComputedTiming().iterations === Infinity)"
_HERE = re.compile(r"(http://127\.0\.0\.1[:/]|data:|blob:|file:)")


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
    gc.collect()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page of its own profile. ``page.requested``: addresses asked for; ``page.complaints``: what its console says."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
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


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """``visit(address, width, height, dark)``: a page of a fresh visitor, as many as a test wants.

    At the end every request that any of them made must have gone to this machine, and no script may have failed.
    """
    contexts, outside, broken = [], [], []

    def opened(address: str, width: int = 1280, height: int = 900, dark: bool = False, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        made = context.new_page()
        made.on("request", lambda request: None if _HERE.match(request.url) else outside.append(request.url))
        made.on("pageerror", lambda error: broken.append(str(error)))
        made.answered = []
        for end in ("requestfinished", "requestfailed"):  # a stream is read to its end, or ended by who reads it
            made.on(end, lambda request: made.answered.append(request.url))
        made.goto(address)
        made.wait_for_function(LISTENS)
        return made

    yield opened
    for context in contexts:
        context.close()
    assert outside == []
    assert broken == []


@pytest.fixture
def shoot(screenshots: Path) -> Any:
    """``shoot(page, name)``: keep a picture of the whole page."""
    return lambda page, name: page.screenshot(path=str(screenshots / f"{name}.png"), full_page=True)


@pytest.fixture(scope="session")
def axe() -> Any:
    """``axe(page)``: what axe-core finds that is serious or critical, as readable lines, once nothing fades in or out."""
    if not AXE.is_file():
        _missing(f"axe-core in {AXE} (npm install --no-save axe-core)")
    script = AXE.read_text(encoding="utf-8")

    def run(page: Any) -> list[str]:
        page.wait_for_function(STILL)
        page.evaluate(script)
        found = page.evaluate("async () => (await axe.run(document)).violations")
        return [f"{v['id']}: {n['html'][:200]}" for v in found if v["impact"] in ("serious", "critical") for n in v["nodes"]]

    return run
