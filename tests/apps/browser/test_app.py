"""The web page in a browser: input, selection, explanation, comparison, downloads, errors, reload, accessibility."""

import json
import re
import shutil
import threading
import time
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("gradio", reason="needs whyformer[app]")

from waiting import HANG, wait_for
from whyformer.apps.web import Catalogue, PageLimits, serve
from whyformer.apps.web.visitor_session import Watch

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [
    pytest.mark.slow,
    # timing varies on a busy machine; a real defect fails three times
    pytest.mark.flaky(reruns=2),
    # gradio leaves sockets and event loops to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "examples" / "pictures" / "digits_37.png"
SENTENCE = "A quite charming film, though it drags."


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "my-digits"
    shutil.copytree(ROOT / "src" / "whyformer" / "bundled" / "digits", folder)
    return Catalogue([folder])


@pytest.fixture(scope="module")
def site(catalogue, free_port):
    urls = []
    limits = PageLimits(pixels=1_000_000, size=2_000_000)
    close = serve(catalogue, limits, port=free_port(), started=urls.append, wait=False)
    yield urls[0]
    close()


def upload(page, path):
    page.set_input_files("#wf-picture input[type=file]", path)


def upload_digits(page):
    """Upload a picture, then choose its model."""
    upload(page, PICTURE)
    wait_for_status(page, "choose a model:")  # not the hint of the example
    page.locator("#wf-model input").fill("bundled:digits")
    page.keyboard.press("Enter")


def clear(page):
    page.locator("#wf-picture button[aria-label=Clear], #wf-picture button[aria-label='Remove Image']").first.click()


def enter_sentence(page, sentence=SENTENCE):
    """Enter a sentence in place of the initial example."""
    page.get_by_label("a sentence").check()
    page.locator(".wf-word").first.wait_for()  # words of the example
    wait_until_explained(page)
    page.locator("#wf-sentence textarea").fill(sentence)
    page.locator("#wf-sentence textarea").blur()
    wait_for_status(page, "Ready")


def select_options(page, box, *names):
    """Choose options of a list by keyboard. Retried, because an update that arrives meanwhile may close the list."""
    for name in names:
        field, option = page.locator(f"{box} input"), page.locator(f"{box} [role=option]").first
        for timeout_ms in (5_000, 10_000, None):
            field.blur()
            field.click()
            field.fill(name)
            try:
                option.wait_for(timeout=timeout_ms)
                break
            except playwright.TimeoutError:
                if timeout_ms is None:
                    raise
        page.keyboard.press("Enter")
        field.blur()


def replace_method(page, name):
    """Choose a method in place of the default."""
    page.locator("#wf-methods input").focus()
    page.keyboard.press("Backspace")
    select_options(page, "#wf-methods", name)


def explain(page):
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_until_explained(page)


def wait_until_explained(page):
    page.wait_for_function("document.querySelector('#wf-status')?.innerText.includes('in all')")


def wait_for_status(page, words):
    page.locator("#wf-status").get_by_text(words).wait_for()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_page_opens_with_example_and_switches_kinds(site, visit, size, shoot):
    page = visit(site, *size)
    picture, frame = page.locator(".wf-map").first.bounding_box(), page.locator(".wf-stored").bounding_box()
    assert 0 < frame["y"] < picture["y"]
    assert picture["y"] + picture["height"] < size[1]
    assert page.evaluate("scrollY") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert "deit-tiny" in page.locator(".wf-stored").inner_text()
    shoot(page, f"app-opened-{size[0]}")
    for kind, part in (("a sentence", ".wf-word"), ("an answer", ".wf-generated"), ("a picture", ".wf-stored")):
        page.get_by_label(kind).check()
        page.locator(part).first.wait_for()
    assert "kind=" not in page.url  # so that a reload shows the stored example


def test_address_with_view_replaces_example(site, visit):
    page = visit(f"{site}#kind=text&sentence=Warm+and+funny.&methods=gae")
    page.locator(".wf-word").first.wait_for()
    wait_until_explained(page)
    assert page.locator(".wf-stored").count() == 0
    assert page.locator("#wf-model input").input_value().startswith("bundled:sst2")
    page.locator("#wf-model input").click()  # an unchanged list changes nothing
    page.keyboard.press("Tab")
    page.locator("#wf-methods input").click()
    assert page.locator("#wf-status").inner_text().endswith("in all.")
    assert page.locator(".wf-word").count() > 2
    first = page.locator("#wf-methods [role=option]").first
    assert "auto" in first.inner_text()
    contents = [first.evaluate(f"(element) => getComputedStyle(element, '::{pseudo}').content") for pseudo in ("before", "after")]
    assert contents[0] == '"Try first"'
    assert "measured best" in contents[1]


def test_click_on_picture_opens_file_chooser(site, visit):
    page = visit(site)
    with page.expect_file_chooser() as choice:
        page.locator("#wf-picture img").click()
    choice.value.set_files(PICTURE)
    wait_for_status(page, "choose a model:")  # not the hint of the example
    assert page.locator(".wf-stored").count() == 0


def test_picture_is_explained_by_two_methods_and_classes(site, visit, shoot):
    page = visit(site)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    assert page.locator(".wf-says li").count() == 5
    select_options(page, "#wf-methods", "rollout")
    page.locator("#wf-classes input").click()
    assert re.match(r"3 \(99\.\d %\)", page.locator("#wf-classes [role=option]").first.inner_text().strip("✓ \n"))
    page.keyboard.press("Escape")
    select_options(page, "#wf-classes", "3", "7")
    explain(page)
    assert page.locator(".wf-map").count() == 3  # rollout has one map for all classes
    assert page.locator(".wf-chart").count() == 4  # one for each method and class
    assert "Better than each random map" in page.locator("#wf-trust").inner_text()
    assert "rollout: the map is the same for every class" in page.locator("#wf-trust").inner_text()
    shoot(page, "app-picture")


def test_values_are_shown_for_pointer_and_keyboard(site, visit):
    page = visit(site)
    upload_digits(page)
    explain(page)
    picture = page.locator(".wf-map").first
    picture.scroll_into_view_if_needed()
    area = picture.bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.8, area["y"] + area["height"] * 0.25)
    line = page.locator(".wf-value").first
    assert re.fullmatch(r"patch in row 3, column 11: -?\d+\.?\d*", line.inner_text())
    page.mouse.move(0, 0)
    assert line.inner_text().strip() == ""
    page.locator("#wf-explain").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "wf-map":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    words = line.inner_text()
    assert re.match(r"patch in row \d+, column \d+: ", words)
    page.keyboard.press("ArrowLeft")
    assert line.inner_text() != words


def test_sentence_is_explained_and_word_shows_attention(site, visit, shoot):
    page = visit(site)
    enter_sentence(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "integrated")
    select_options(page, "#wf-classes", "neg", "pos")
    explain(page)
    assert page.locator(".wf-text[role=group]").count() == 3  # one method shows a single text for both classes, because their colours are opposite
    page.locator(".wf-word", has_text="charming").first.click()
    table = page.locator(".wf-attended")
    table.wait_for()
    assert "“charming” attends to" in table.inner_text()
    shares = [float(s) for s in re.findall(r"([\d.]+) %", table.locator("table").inner_text())]
    assert sum(shares) == pytest.approx(100, abs=0.4)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "film"
    page.keyboard.press("Enter")
    page.get_by_text("“film” attends to").wait_for()
    before = table.inner_text()
    page.locator("#wf-block input").click()
    page.get_by_role("option", name="block 0").click()
    page.get_by_text("attention in block 0").wait_for()
    assert table.inner_text() != before
    shoot(page, "app-sentence")


def test_text_that_is_pasted_or_cut_clears_result(site, visit):
    """Such a change comes without a key that writes a character."""
    page = visit(site)
    page.get_by_label("a sentence").check()
    page.locator(".wf-word").first.wait_for()
    wait_until_explained(page)
    page.locator("#wf-sentence textarea").focus()
    page.keyboard.insert_text(" Dull.")
    page.get_by_text("The maps appear here.").wait_for()
    explain(page)
    page.locator("#wf-sentence textarea").focus()
    page.keyboard.press("Backspace")
    page.get_by_text("The maps appear here.").wait_for()


def test_settings_change_scores_and_style_changes_only_drawing(site, visit, catalogue):
    page = visit(site)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    replace_method(page, "transformer_attribution")
    explain(page)
    ran = []
    handle = catalogue.load("bundled:digits").model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        first = page.locator(".wf-map").first.get_attribute("data-values")
        page.get_by_role("button", name="Settings").click()
        page.locator("#wf-form summary").click()
        assert page.locator("#wf-form [data-key]").count() == 5
        slider = page.locator("[data-key=start_layer]")
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.locator("#wf-code").get_by_text("start_layer=1").first.wait_for()
        wait_until_explained(page)
        assert page.locator(".wf-map").first.get_attribute("data-values") != first
        before = len(ran)
        page.locator("#wf-opacity input[type=range]").focus()
        for _ in range(4):
            page.keyboard.press("ArrowLeft")
        page.locator("#wf-opacity input[type=range]").dispatch_event("pointerup")
        page.locator("#wf-code").get_by_text("--opacity 0.8").first.wait_for()
        page.get_by_label("only what matters").check()
        page.locator(".wf-cell").get_by_text("the 20 % with the highest scores").wait_for()
        assert len(ran) == before  # redrawn without a forward pass
    finally:
        handle.remove()
    select_options(page, "#wf-methods", "smoothgrad")
    page.locator("[data-method=smoothgrad][data-key=noise]").wait_for(state="attached")
    assert page.locator("[data-method=transformer_attribution][data-key=start_layer]").input_value() == "1"


def test_results_are_downloaded(site, visit):
    page = visit(site)
    upload_digits(page)
    explain(page)
    for kind in ("png", "html", "json"):
        with page.expect_download() as started:
            page.get_by_role("button", name=kind.upper(), exact=True).click()
        file = started.value
        content = Path(file.path()).read_bytes()
        assert file.suggested_filename.startswith("digits_37-libragrad-3.")
        if kind == "png":
            assert Image.open(BytesIO(content)).width > 300
        elif kind == "html":
            assert "libragrad · chosen automatically" in content.decode()
        else:
            assert json.loads(content)["explanations"][0]["diagnostics"]["auto"]["method"] == "libragrad"
    code = page.locator(".wf-code")
    assert "whyformer.explain" in code.nth(0).inner_text()
    assert code.nth(1).inner_text().startswith("whyformer explain digits_37.png --model bundled:digits")


def test_photograph_requires_choice_of_model(site, visit, tmp_path):
    """The initial model classifies digits and would predict "4: 98.6 %" for a photograph."""
    Image.effect_noise((320, 240), 60).convert("RGB").save(tmp_path / "photo.png")
    page = visit(site)
    upload(page, tmp_path / "photo.png")
    wait_for_status(page, "choose a model:")  # not the hint of the example
    assert page.locator("#wf-model input").input_value() == ""
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_for_status(page, "choose a model:")  # not the hint of the example
    assert page.locator(".wf-stored").count() == 0
    assert page.locator(".wf-map").count() == 0
    page.locator(".wf-example").first.click()  # the examples' model is chosen with it
    page.get_by_text("The model says").wait_for()
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_errors_show_messages_and_page_keeps_working(site, visit, tmp_path, shoot):
    page = visit(site)
    clear(page)
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_for_status(page, "there is no picture yet")
    (tmp_path / "note.png").write_text("no picture at all")
    upload(page, tmp_path / "note.png")
    wait_for_status(page, "note.png is not a picture")
    clear(page)
    Image.new("RGB", (1500, 1000)).save(tmp_path / "large.png")
    upload(page, tmp_path / "large.png")
    wait_for_status(page, "1 megapixels")
    page.reload()
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    page.locator("#wf-model input").fill("../../etc")
    page.keyboard.press("Enter")
    wait_for_status(page, "no model id")
    page.locator("#wf-model input").fill("nobody/nothing")
    page.keyboard.press("Enter")
    wait_for_status(page, "cannot load 'nobody/nothing'")
    page.locator("#wf-model input").fill("bundled:sst2")
    page.keyboard.press("Enter")
    wait_for_status(page, "reads text")
    shoot(page, "app-error")
    page.locator("#wf-model input").fill("bundled:digits")
    page.keyboard.press("Enter")
    page.get_by_text("The model says").wait_for()
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_large_upload_is_refused(site, visit, tmp_path):
    (tmp_path / "huge.bmp").write_bytes(b"BM" + bytes(2_500_000))
    page = visit(site)
    upload(page, tmp_path / "huge.bmp")
    page.get_by_text(re.compile("maximum allowed size|too large|exceeds", re.I)).first.wait_for()
    assert page.get_by_text("The model says").count() == 0


def start_long_explanation(site, visit):
    """Return a page that is computing maps of three methods."""
    page = visit(site)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "occlusion", "vit_cx")
    page.get_by_role("button", name="Explain", exact=True).click()
    wait_for_status(page, re.compile("maps …|Reading"))
    return page


def test_cancel_ends_computation(site, visit):
    page = start_long_explanation(site, visit)
    page.get_by_role("button", name="Cancel").click()
    wait_for_status(page, "Cancelled.")
    page.wait_for_timeout(500)
    assert page.locator("#wf-status").inner_text().strip() == "Cancelled."
    explain(page)
    assert page.locator(".wf-map").count() == 3


def test_cancel_is_shown_without_answer_of_server(site, visit):
    page = start_long_explanation(site, visit)
    page.route("**/queue/join*", lambda route: route.abort())
    page.get_by_role("button", name="Cancel").click()
    wait_for_status(page, "Cancelled.")


@pytest.mark.parametrize("change", ["example", "clear"])
def test_new_input_ends_computation(site, visit, change):
    page = start_long_explanation(site, visit)
    if change == "example":
        page.locator(".wf-example").nth(1).click()
        wait_for_status(page, "Ready")
    else:
        clear(page)
        wait_for_status(page, "no picture yet")
    assert page.locator(".wf-map").count() == 0
    if change == "clear":
        upload(page, PICTURE)
        wait_for_status(page, "Ready")
    explain(page)
    assert page.locator(".wf-map").count() == 3


@contextmanager
def queued_page(site, visit, catalogue):
    """A page whose Explain is queued until the block ends, because another visitor's explanation is running."""
    busy, queued = visit(site), visit(site)
    for page in (busy, queued):
        upload_digits(page)
        page.get_by_text("The model says").wait_for()
    released = threading.Event()

    def block(*_):
        released.wait(HANG)

    handle = catalogue.load("bundled:digits").model.register_forward_pre_hook(block)
    try:
        busy.get_by_role("button", name="Explain", exact=True).click()
        wait_for_status(busy, re.compile("maps? …|Reading"))
        queued.get_by_role("button", name="Explain", exact=True).click()
        wait_for_status(queued, "Waiting")
        yield queued
    finally:
        released.set()
        handle.remove()
    wait_until_explained(busy)


def test_queued_explanation_can_be_cancelled(site, visit, catalogue):
    with queued_page(site, visit, catalogue) as page:
        page.get_by_role("button", name="Cancel").click()
        wait_for_status(page, "Cancelled.")
    page.wait_for_timeout(500)
    assert page.locator(".wf-map").count() == 0
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_queued_explanation_of_abandoned_input_does_not_start(site, visit, catalogue):
    with queued_page(site, visit, catalogue) as page:
        page.locator(".wf-example").nth(1).click()
    wait_for_status(page, "Ready")
    page.wait_for_timeout(500)
    assert page.locator(".wf-map").count() == 0
    assert "Ready" in page.locator("#wf-status").inner_text()
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_reload_keeps_view_and_other_visitor_sees_example(site, visit):
    page = visit(site)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "rollout")
    select_options(page, "#wf-classes", "7")
    explain(page)
    before = [m.get_attribute("data-values") for m in page.locator(".wf-map").all()]
    assert page.url.endswith("classes=%237"), page.url
    other = visit(site)
    other.locator(".wf-stored").wait_for()
    page.reload()
    wait_until_explained(page)
    assert [m.get_attribute("data-values") for m in page.locator(".wf-map").all()] == before
    assert page.locator(".wf-says li").count() == 5
    assert page.locator("#wf-picture img").count() == 1
    assert "rollout" in page.locator("#wf-methods").inner_text()
    page.locator("#wf-classes .token").get_by_text("7 (").wait_for()
    assert page.locator(".wf-stored").count() == 0
    assert "digits_37" not in other.locator("#wf-code").inner_text()
    page.goto("about:blank")
    page.goto(site)  # without the fragment
    page.locator(".wf-stored").wait_for()
    assert page.locator(".wf-map").count() == 1


def test_second_text_is_explained_and_kept_by_reload(site, visit):
    page = visit(site)
    enter_sentence(page)
    page.locator("#wf-pair textarea").fill("Hardly anything happens.")
    page.locator("#wf-pair textarea").blur()
    wait_for_status(page, "Ready")
    explain(page)
    assert "Hardly" in page.locator(".wf-sentences").inner_text()
    page.reload()
    page.locator(".wf-word").first.wait_for()
    wait_until_explained(page)
    assert page.locator("#wf-pair textarea").input_value() == "Hardly anything happens."
    assert "Hardly" in page.locator(".wf-sentences").inner_text()


def test_reload_keeps_sentence_and_settings(site, visit):
    page = visit(site)
    enter_sentence(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "transformer_attribution")
    page.get_by_role("button", name="Settings").click()
    layer = page.locator("[data-key=start_layer]")

    def setting_is_kept():  # the prediction for the sentence may arrive in between and redraw the settings, folded
        if not layer.is_visible():
            page.locator("#wf-form summary").last.click()
        layer.fill("1")
        layer.dispatch_event("change")
        page.wait_for_timeout(500)
        return layer.input_value() == "1"

    wait_for(setting_is_kept, "the setting to stay")
    explain(page)
    page.locator("#wf-code").get_by_text("start_layer=1").first.wait_for()
    page.reload()
    wait_until_explained(page)
    assert page.locator("#wf-sentence textarea").input_value() == SENTENCE
    assert page.get_by_label("a sentence").is_checked()
    assert "start_layer=1" in page.locator("#wf-code").inner_text()
    assert page.locator("[data-key=start_layer]").input_value() == "1"
    explain(page)  # with the settings of the form
    assert "start_layer=1" in page.locator("#wf-code").inner_text()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_example_is_explained_without_scrolling(site, visit, size, shoot):
    page = visit(site, *size)
    page.locator(".wf-example").nth(1).click()
    page.get_by_text("The model says").wait_for()
    area = page.locator("#wf-explain").bounding_box()
    assert area["y"] + area["height"] < size[1]
    assert page.evaluate("scrollY") == 0
    explain(page)
    picture, column = page.locator(".wf-map").first.bounding_box(), page.locator("#wf-answer").bounding_box()
    assert picture["width"] >= min(0.95 * column["width"] - 30, 0.79 * size[1])

    def is_visible_and_static():
        before = page.locator(".wf-map").first.bounding_box()["y"]
        page.wait_for_timeout(300)
        return page.locator(".wf-map").first.bounding_box()["y"] == before < size[1]

    wait_for(is_visible_and_static, "the map to come into sight, and the page to come to rest")
    shoot(page, f"app-example-{size[0]}")
    page.evaluate("scrollTo(0, 0)")
    page.get_by_label("a sentence").check()
    page.locator(".wf-word").first.wait_for()  # words of the example
    wait_until_explained(page)
    page.get_by_role("button", name="Warm, funny").click()
    page.wait_for_function("document.querySelector('#wf-sentence textarea').value === 'Warm, funny, and full of life.'")
    wait_for_status(page, "Ready")
    assert page.locator("#wf-explain").bounding_box()["y"] < size[1] - 40


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_class_bars_select_explained_classes(site, visit, size):
    page = visit(site, *size)
    page.locator(".wf-example").first.click()
    page.get_by_text("The model says").wait_for()
    bars = page.locator(".wf-class")
    assert not page.locator("#wf-cancel").is_visible()  # nothing runs
    explain(page)
    assert page.locator(".wf-map").count() == 1
    bars.nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.wf-map').length === 2")
    wait_until_explained(page)
    assert not page.locator("#wf-cancel").is_visible()
    assert [bar.get_attribute("aria-pressed") for bar in bars.all()] == ["true", "true", "false", "false", "false"]
    assert page.locator("#wf-classes .token").count() == 2
    bars.nth(0).click()
    page.wait_for_function("document.querySelectorAll('.wf-map').length === 1")
    wait_until_explained(page)
    assert f"“{bars.nth(1).locator('bdi').inner_text()}”" in page.locator(".wf-cell bdi").first.inner_text()
    page.locator(".wf-example").nth(1).click()  # a new input: no results of the previous one
    page.locator(".wf-map").wait_for(state="detached")
    assert not page.locator("#wf-more").is_visible()
    assert not page.locator("#wf-looks").is_visible()


def test_progress_bar_overlaps_nothing(site, visit, monkeypatch):
    step = Watch.__call__

    def slowly(self, *work, **kwargs):
        for item in step(self, *work, **kwargs):
            time.sleep(0.1)  # otherwise the bar disappears too early on a fast machine
            yield item

    monkeypatch.setattr(Watch, "__call__", slowly)
    page = visit(site)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "occlusion", "vit_cx")
    page.get_by_role("button", name="Explain", exact=True).click()
    # read in one call, before the bar disappears
    areas = page.wait_for_function("""() => {
      if (!document.querySelector("#wf-progress .progress-bar")) return null;
      const seen = ["#wf-progress [data-testid=status-tracker]", "#wf-status p", "#wf-says h2", "#wf-explain"];
      return seen.map((one) => document.querySelector(one).getBoundingClientRect()).map((r) => [r.top, r.bottom]);
    }""").json_value()
    (top, bottom), *other_areas = areas
    assert bottom > top + 20
    for above, below in other_areas:
        assert above >= bottom or below <= top
    wait_until_explained(page)
    assert not page.locator("#wf-progress").is_visible()


def test_page_reports_server_shutdown_and_restart(catalogue, visit, free_port, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # restored at the end for the server of the other tests
    port, urls = free_port(), []
    close = serve(catalogue, port=port, started=urls.append, wait=False)
    page = visit(urls[0])
    page.locator("#wf-explain").wait_for()
    while not any("queue/data" in url for url in page.finished_requests):  # until no response is pending
        page.wait_for_timeout(100)
    assert page.locator(".wf-gone").count() == 0
    close()
    page.locator(".wf-gone").get_by_text("is gone").wait_for()
    close = serve(catalogue, port=port, started=urls.append, wait=False)
    page.locator(".wf-gone").get_by_text("started again").wait_for()
    page.get_by_role("link", name="Reload the page.").click()
    page.locator("#wf-explain").wait_for()
    assert page.locator(".wf-gone").count() == 0
    close()


def test_local_model_folder_is_offered_by_name(site, visit):
    page = visit(site)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    page.locator("#wf-model input").click()
    page.get_by_role("option", name="folder:my-digits").click()
    explain(page)
    assert "my-digits" in page.locator(".wf-code").first.inner_text()


def focused(page):
    return page.evaluate("document.activeElement.value || document.activeElement.innerText")


def tab_to(page, reached):
    """Press Tab until ``reached`` returns True."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if reached():
            return
    raise AssertionError(f"40 times Tab end on {focused(page)!r}")


def test_sentence_is_explained_by_keyboard_alone(site, visit):
    page = visit(site)
    page.locator("#wf-explain").wait_for()
    tab_to(page, lambda: focused(page) == "text")
    page.keyboard.press("Space")
    page.locator("#wf-sentence textarea").wait_for()
    wait_until_explained(page)
    tab_to(page, lambda: page.evaluate("document.activeElement.tagName") == "TEXTAREA")
    page.keyboard.press("Control+A")
    page.keyboard.type("Warm, funny, and charming.")
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('#wf-says').innerText.includes('positive')")
    tab_to(page, lambda: focused(page) == "Explain")
    page.keyboard.press("Enter")
    wait_until_explained(page)
    assert page.locator(".wf-word").count() > 5


def test_layout_fits_phone(site, visit, shoot):
    page = visit(site, 390, 844, has_touch=True, is_mobile=True)
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "rollout")
    explain(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert all(box["width"] > 250 for box in (m.bounding_box() for m in page.locator(".wf-map").all()))
    for scheme in in_both_schemes(page):
        shoot(page, f"app-phone-picture-{scheme}")
    enter_sentence(page)
    page.wait_for_function("document.querySelector('#wf-says').innerText.includes('positive')")
    explain(page)
    page.locator(".wf-word").nth(2).tap()
    page.locator(".wf-attended").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for scheme in in_both_schemes(page):
        shoot(page, f"app-phone-sentence-{scheme}")


def in_both_schemes(page):
    """Show the page in light, then in dark colours; yield the name of the scheme."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"document.body.classList.contains('dark') === {str(scheme == 'dark').lower()}")
        yield scheme


def test_axe_reports_no_serious_violations(site, visit, axe, shoot):
    page = visit(site)
    page.locator("#wf-explain").wait_for()
    for scheme in in_both_schemes(page):
        assert axe(page) == [], scheme
    upload_digits(page)
    page.get_by_text("The model says").wait_for()
    select_options(page, "#wf-methods", "rollout")
    page.get_by_role("button", name="Settings").click()
    for summary in page.locator("#wf-form summary").all():
        summary.click()
    explain(page)
    for scheme in in_both_schemes(page):
        assert axe(page) == [], scheme
        shoot(page, f"app-axe-{scheme}")
    enter_sentence(page)
    page.wait_for_function("document.querySelector('#wf-says').innerText.includes('positive')")
    explain(page)
    page.locator(".wf-word").nth(2).click()
    page.locator(".wf-attended").wait_for()
    for scheme in in_both_schemes(page):
        assert axe(page) == [], scheme
    page.locator("#wf-model input").fill("../../etc")
    page.keyboard.press("Enter")
    wait_for_status(page, "no model id")
    for scheme in in_both_schemes(page):
        assert axe(page) == [], scheme
