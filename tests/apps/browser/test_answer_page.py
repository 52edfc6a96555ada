"""Answers on the web page in a browser: prompt, hover, selection of words, keyboard, reload."""

import re

import pytest

pytest.importorskip("gradio", reason="needs whyformer[app]")

from apps.browser.test_app import clear, wait_for_status, wait_until_explained
from whyformer.apps.web import Catalogue, PageLimits, serve

pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.flaky(reruns=2),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MAP_VISIBILITY = "[...document.querySelectorAll('.m')].map((element) => getComputedStyle(element).visibility)"
RECORD_ANSWER = """() => new MutationObserver(() => {
    const last = document.querySelector('.wf-writing p:last-child');
    if (last) window.answer = last.innerText;
}).observe(document, {childList: true, subtree: true, characterData: true})"""
HIGHLIGHTED = """[...document.querySelectorAll('.wf-generated .t p label')]
    .filter((element) => !/, 0\\)$|transparent/.test(getComputedStyle(element).backgroundColor)).map((element) => element.innerText.trim())"""


@pytest.fixture(scope="module")
def site(shared, free_port):
    urls = []
    catalogue = Catalogue([shared / "weights" / "stories260k"], hub=False)
    close = serve(catalogue, PageLimits(), port=free_port(), started=urls.append, wait=False)
    yield urls[0]
    close()


def open_example_answer(page):
    page.get_by_label("an answer").check()  # the first example is explained without further input
    wait_until_explained(page)
    page.locator(".wf-generated").wait_for()


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 900, False), (390, 844, True)], ids=["screen", "phone"])
def test_question_about_picture_is_explained(site, visit, axe, shoot, width, height, dark):
    page = visit(site, width, height, dark)
    open_example_answer(page)
    shoot(page, f"app-answer-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    words = page.locator(".wf-generated label.w")
    assert words.first.inner_text().strip() == "8"  # the digit on the left of that picture
    assert words.count() == 1  # the end token is not a word
    assert page.locator(".wf-generated .dall").is_visible()  # the whole answer is selected
    assert page.evaluate(MAP_VISIBILITY) == ["visible", "hidden"]
    words.last.hover()
    assert page.evaluate(MAP_VISIBILITY) == ["hidden", "visible"]  # the map of the word under the pointer
    page.locator(".wf-head").hover()
    assert page.evaluate(MAP_VISIBILITY) == ["visible", "hidden"]
    assert "left" in page.evaluate(HIGHLIGHTED)
    page.locator(".wf-generated label", has_text="on").first.click()
    assert page.evaluate(MAP_VISIBILITY) == ["hidden", "hidden"]  # a word of the prompt has no map, so the picture itself is shown
    assert set(page.evaluate(HIGHLIGHTED)) == {"8"}  # only words of the answer
    assert not page.locator(".wf-generated .dall").is_visible()
    page.locator(".wf-generated label", has_text="Whole answer").click()
    assert page.evaluate(MAP_VISIBILITY) == ["visible", "hidden"]
    assert axe(page) == []
    code = page.locator("#wf-code").inner_text()
    assert "whyformer.explain_generation(" in code
    assert "whyformer generate" in code and "-n 16" in code
    address = page.url
    assert "kind=answer" in address
    page.reload()
    wait_until_explained(page)
    assert page.locator(".wf-generated label.w").first.inner_text().strip() == "8"
    assert page.locator("#wf-sentence textarea").input_value() == "what is on the left ?"
    assert page.url == address


def test_language_model_answer_is_navigated_by_keyboard(site, visit):
    page = visit(site)
    page.get_by_label("an answer").check()
    wait_until_explained(page)
    clear(page)  # the picture of the example
    page.get_by_label("Prompt").fill("Once upon a time")
    page.get_by_label("Prompt").blur()
    page.locator("#wf-model input").click()
    page.get_by_role("option", name="folder:stories260k").click()
    wait_for_status(page, "Ready")
    page.evaluate(RECORD_ANSWER)
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_until_explained(page)
    assert page.evaluate("window.answer").strip().startswith(", there was a little girl")  # the answer was shown during generation
    assert page.locator(".wf-generated .seen").count() == 0
    words = page.locator(".wf-generated label.w")
    assert words.count() == 16
    assert words.evaluate_all("all => all.some((element) => getComputedStyle(element).outlineStyle === 'solid')") is False
    page.locator(".wf-generated input:checked").focus()
    first = page.evaluate(HIGHLIGHTED)
    assert set(first) <= {"Once", "upon", "a", "time"}  # the sources of the whole answer are words of the prompt
    page.keyboard.press("ArrowLeft")  # the last word precedes the whole answer
    assert re.match(r"written: ", page.locator(".wf-generated input:checked").get_attribute("aria-label"))
    assert page.evaluate(HIGHLIGHTED) != first
    with page.expect_download() as started:
        page.get_by_role("button", name="PNG", exact=True).click()
    assert started.value.suggested_filename == "Once_upon_a_time-attnlrp-answer.png"


def test_model_that_cannot_generate_shows_message(site, visit):
    page = visit(site)
    page.get_by_label("an answer").check()
    wait_until_explained(page)
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_for_status(page, "there is no text yet")
    page.get_by_label("Prompt").fill("What is on the left?")
    page.locator("#wf-model input").click()
    page.get_by_role("option", name="bundled:digits").click()
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_for_status(page, "writes nothing")
    page.get_by_label("a picture").check()
    page.locator(".wf-stored").wait_for()
    page.locator("#wf-classes").wait_for()
    assert page.locator("#wf-length").count() == 0
    assert page.locator("#wf-methods").inner_text().find("auto") >= 0
