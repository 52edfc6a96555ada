"""The page's answers as people meet them: ask, point at a word, choose one, read it by keyboard, come back."""

import re

import pytest

pytest.importorskip("gradio", reason="needs whyformer[app]")

from apps.browser.test_app import clear, finished, says
from whyformer.apps.web import Catalogue, PageLimits, serve

pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.flaky(reruns=2),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MAPS = "[...document.querySelectorAll('.m')].map((one) => getComputedStyle(one).visibility)"
KEPT = """() => new MutationObserver(() => {
    const last = document.querySelector('.wf-writing p:last-child');
    if (last) window.written = last.innerText;
}).observe(document, {childList: true, subtree: true, characterData: true})"""
LIT = """[...document.querySelectorAll('.wf-generated .t p label')]
    .filter((one) => !/, 0\\)$|transparent/.test(getComputedStyle(one).backgroundColor)).map((one) => one.innerText.trim())"""


@pytest.fixture(scope="module")
def site(shared, free_port):
    found = []
    catalogue = Catalogue([shared / "weights" / "stories260k"], hub=False)
    close = serve(catalogue, PageLimits(), port=free_port(), started=found.append, wait=False)
    yield found[0]
    close()


def asked_about_a_picture(page):
    page.get_by_label("an answer").check()  # nothing else: the first example is explained at once
    finished(page)
    page.locator(".wf-generated").wait_for()


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 900, False), (390, 844, True)], ids=["screen", "phone"])
def test_a_question_about_a_picture(site, visit, axe, shoot, width, height, dark):
    page = visit(site, width, height, dark)
    asked_about_a_picture(page)
    shoot(page, f"app-answer-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    written = page.locator(".wf-generated label.w")
    assert written.first.inner_text().strip() == "8"  # what is on the left of that picture
    assert written.count() == 1  # the token that ends the answer is no word of it
    assert page.locator(".wf-generated .dall").is_visible()  # the whole answer is chosen
    assert page.evaluate(MAPS) == ["visible", "hidden"]
    written.last.hover()
    assert page.evaluate(MAPS) == ["hidden", "visible"]  # the map of the word under the pointer
    page.locator(".wf-head").hover()
    assert page.evaluate(MAPS) == ["visible", "hidden"]
    assert "left" in page.evaluate(LIT)
    page.locator(".wf-generated label", has_text="on").first.click()
    assert page.evaluate(MAPS) == ["hidden", "hidden"]  # a word of the prompt has no map: the picture itself
    assert set(page.evaluate(LIT)) == {"8"}  # only words of the answer
    assert not page.locator(".wf-generated .dall").is_visible()
    page.locator(".wf-generated label", has_text="Whole answer").click()
    assert page.evaluate(MAPS) == ["visible", "hidden"]
    assert axe(page) == []
    said = page.locator("#wf-code").inner_text()
    assert "whyformer.explain_generation(" in said
    assert "whyformer generate" in said and "-n 16" in said
    address = page.url
    assert "kind=answer" in address
    page.reload()
    finished(page)
    assert page.locator(".wf-generated label.w").first.inner_text().strip() == "8"
    assert page.locator("#wf-sentence textarea").input_value() == "what is on the left ?"
    assert page.url == address


def test_a_language_model_by_keyboard(site, visit):
    page = visit(site)
    page.get_by_label("an answer").check()
    finished(page)
    clear(page)  # the picture of the example
    page.get_by_label("Prompt").fill("Once upon a time")
    page.get_by_label("Prompt").blur()
    page.locator("#wf-model input").click()
    page.get_by_role("option", name="folder:stories260k").click()
    says(page, "Ready")
    page.evaluate(KEPT)
    page.get_by_role("button", name="Explain", exact=True).click()
    finished(page)
    assert page.evaluate("window.written").strip().startswith(", there was a little girl")  # it stood on the page while it was written
    assert page.locator(".wf-generated .seen").count() == 0
    written = page.locator(".wf-generated label.w")
    assert written.count() == 16
    assert written.evaluate_all("all => all.some((one) => getComputedStyle(one).outlineStyle === 'solid')") is False
    page.locator(".wf-generated input:checked").focus()
    first = page.evaluate(LIT)
    assert set(first) <= {"Once", "upon", "a", "time"}  # what made the whole answer: words of the prompt
    page.keyboard.press("ArrowLeft")  # before the whole answer stands the last word
    assert re.match(r"written: ", page.locator(".wf-generated input:checked").get_attribute("aria-label"))
    assert page.evaluate(LIT) != first
    with page.expect_download() as started:
        page.get_by_role("button", name="PNG", exact=True).click()
    assert started.value.suggested_filename == "Once_upon_a_time-attnlrp-answer.png"


def test_what_cannot_answer_says_so(site, visit):
    page = visit(site)
    page.get_by_label("an answer").check()
    finished(page)
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="Explain", exact=True).click()
    says(page, "there is no text yet")
    page.get_by_label("Prompt").fill("What is on the left?")
    page.locator("#wf-model input").click()
    page.get_by_role("option", name="bundled:digits").click()
    page.get_by_role("button", name="Explain", exact=True).click()
    says(page, "writes nothing")
    page.get_by_label("a picture").check()
    page.locator(".wf-stored").wait_for()
    page.locator("#wf-classes").wait_for()
    assert page.locator("#wf-length").count() == 0
    assert page.locator("#wf-methods").inner_text().find("auto") >= 0
