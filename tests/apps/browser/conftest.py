"""Fixtures of a Chromium browser driven by playwright. Without it the tests are skipped; under CI they fail."""

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
TIMEOUT = int(os.environ.get("WHYFORMER_PATIENCE", 240_000))
"""Milliseconds, for busy machines. Less than HANG, so that a failure names the condition that was not met."""
IS_READY = "!window.gradio_config || 'ready' in document.documentElement.dataset"
IS_STATIC = "document.getAnimations().every((animation) => animation.playState !== 'running' || animation.effect.getComputedTiming().iterations === Infinity)"
_LOCAL = re.compile(r"(http://127\.0\.0\.1[:/]|data:|blob:|file:)")


def _missing(requirement: str) -> NoReturn:
    message = f"the tests in a browser need {requirement}"
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
    """A new page with a new profile. ``page.requested``: requested URLs; ``page.console_errors``: errors and warnings of the console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(TIMEOUT)
    new_page = context.new_page()
    new_page.requested, new_page.console_errors = [], []
    new_page.on("request", lambda request: new_page.requested.append(request.url))
    new_page.on("console", lambda message: new_page.console_errors.append(message.text) if message.type in ("error", "warning") else None)
    new_page.on("pageerror", lambda error: new_page.console_errors.append(str(error)))
    yield new_page
    context.close()


@pytest.fixture
def screenshots() -> Path:
    """The folder of screenshots, for visual inspection; git ignores it."""
    SCREENSHOTS.mkdir(exist_ok=True)
    return SCREENSHOTS


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """``visit(address, width, height, dark)``: open a page for a new visitor, any number of times.

    At the end, no page may have sent a request to another machine, and no script may have failed.
    """
    contexts, outside, script_errors = [], [], []

    def open_page(address: str, width: int = 1280, height: int = 900, dark: bool = False, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **options)
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        new_page = context.new_page()
        new_page.on("request", lambda request: None if _LOCAL.match(request.url) else outside.append(request.url))
        new_page.on("pageerror", lambda error: script_errors.append(str(error)))
        new_page.finished_requests = []
        for end in ("requestfinished", "requestfailed"):  # a stream is read to its end or aborted by the reader
            new_page.on(end, lambda request: new_page.finished_requests.append(request.url))
        new_page.goto(address)
        new_page.wait_for_function(IS_READY)
        return new_page

    yield open_page
    for context in contexts:
        context.close()
    assert outside == []
    assert script_errors == []


@pytest.fixture
def shoot(screenshots: Path) -> Any:
    """``shoot(page, name)``: save a screenshot of the full page."""
    return lambda page, name: page.screenshot(path=str(screenshots / f"{name}.png"), full_page=True)


@pytest.fixture(scope="session")
def axe() -> Any:
    """``axe(page)``: serious and critical violations that axe-core reports, as readable lines, after all animations have ended."""
    if not AXE.is_file():
        _missing(f"axe-core in {AXE} (npm install --no-save axe-core)")
    script = AXE.read_text(encoding="utf-8")

    def run(page: Any) -> list[str]:
        page.wait_for_function(IS_STATIC)
        page.evaluate(script)
        violations = page.evaluate("async () => (await axe.run(document)).violations")
        return [f"{v['id']}: {n['html'][:200]}" for v in violations if v["impact"] in ("serious", "critical") for n in v["nodes"]]

    return run
