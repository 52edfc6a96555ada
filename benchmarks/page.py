"""How long the web page takes from a warm click to the first map, beside one plain forward pass of the same model.

    python benchmarks/page.py [--browser | --processor] [--runs 15]

Each run explains an input that the session has not seen. Without --browser the time is that of the page's own function
until the first map is ready to send; with it, that from the click to the map in Debian's chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from whyformer.apps.web import Catalogue, PageLimits, serve
from whyformer.apps.web.handlers import Handlers
from whyformer.apps.web.page_input import CONTROLS
from whyformer.apps.web.visitor_session import VisitorSession
from whyformer.inputs import prepare
from whyformer.inputs.pictures import open_picture

PICTURE = Path(__file__).parents[1] / "examples" / "pictures" / "digits_37.png"
SENTENCE = "An utterly charming film, though it drags for minute number {}."
MODELS = {"image": "bundled:digits", "text": "bundled:sst2"}


def inputs(folder: Path, runs: int) -> dict[str, list[str]]:
    """As many different pictures and sentences as there are runs, and one to warm up."""
    picture = Image.open(PICTURE).convert("RGB")
    paths = []
    for i in range(runs + 1):
        picture.putpixel((i, 0), (255, 255, 255))
        paths.append(str(folder / f"{i}.png"))
        picture.save(paths[-1])
    return {"image": paths, "text": [SENTENCE.format(i) for i in range(runs + 1)]}


def forward(catalogue: Catalogue, kind: str, given: str, clock: Callable[[], float]) -> float:
    """Seconds of one plain forward pass of a prepared input, the median of 15; of the processor where so chosen."""
    loaded = catalogue.load(MODELS[kind])
    args, kwargs = prepare(loaded.model, open_picture(given) if kind == "image" else given, loaded.processor).feed
    times = []
    for _ in range(15):
        began = clock()
        with torch.inference_mode():
            loaded.model(*args, **kwargs)
        times.append(clock() - began)
    return statistics.median(times)


def function(handlers: Handlers, kind: str, given: list[str], clock: Callable[[], float]) -> list[float]:
    """Seconds from the call of the page's function to the first map, in one session; the first one is not counted."""
    session, times = VisitorSession(), []
    for one in given:
        picture, sentence = ({"path": one}, "") if kind == "image" else (None, one)
        session.kind = kind
        entered = dict.fromkeys(CONTROLS) | {"kind": kind, "picture": picture, "sentence": sentence}
        entered |= {"model": MODELS[kind], "methods": ["transformer_attribution"]}
        list(handlers.look(session, entered))  # the page calls this when the input is dropped
        began = clock()
        steps = handlers.explain(session, entered)
        next(step for step in steps if "board" in step)
        times.append(clock() - began)
        list(steps)
    return times[1:]


def browser(address: str, kind: str, given: list[str]) -> list[float]:
    """Seconds from the click to the new map in the page."""
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page()
        page.goto(address)
        page.locator("#wf-explain").wait_for()
        if kind == "text":
            page.get_by_label("a sentence").check()
        shown = ".wf-map" if kind == "image" else ".wf-text"
        for one in given:
            if kind == "image":
                page.set_input_files("#wf-picture input[type=file]", one)
            else:
                page.locator("#wf-sentence textarea").fill(one)
                page.locator("#wf-sentence textarea").blur()
            page.get_by_text("Ready: press Explain").wait_for()
            page.evaluate(f"document.querySelectorAll('{shown}').forEach((e) => e.remove())")
            began = time.perf_counter()
            page.locator("#wf-explain").click()
            page.locator(shown).first.wait_for()
            times.append(time.perf_counter() - began)
            page.wait_for_function("document.querySelector('#wf-status').innerText.includes('in all')")
        chromium.close()
    return times[1:]


def main() -> None:
    """Measure, and print one JSON line for each kind of input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--browser", action="store_true", help="measure in chromium")
    parser.add_argument("--processor", action="store_true", help="count processor time, on a machine that is busy")
    asked = parser.parse_args()
    catalogue, clock = Catalogue(), time.process_time if asked.processor else time.perf_counter
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        given = inputs(folder, asked.runs)
        close, found = (lambda: None), list[str]()
        if asked.browser:
            close = serve(catalogue, started=found.append, wait=False)
        for kind in MODELS:
            plain = forward(catalogue, kind, given[kind][0], clock)
            if asked.browser:
                times = browser(found[0], kind, given[kind])
            else:
                times = function(Handlers(catalogue, PageLimits(), folder), kind, given[kind], clock)
            median = statistics.median(times)
            print(
                json.dumps(
                    {
                        "model": MODELS[kind],
                        "where": "browser" if asked.browser else "function",
                        "median_ms": round(1000 * median, 1),
                        "slowest_ms": round(1000 * max(times), 1),
                        "plain_forward_ms": round(1000 * plain, 2),
                        "ratio": round(median / plain, 1),
                        "threads": torch.get_num_threads(),
                    }
                )
            )
        close()


if __name__ == "__main__":
    main()
