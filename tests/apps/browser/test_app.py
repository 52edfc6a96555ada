"""The web page as people meet it: drop, type, choose, explain, compare, read, keep, go wrong, come back."""

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
    # what a person waits for differs from run to run on a busy machine; what is broken fails three times
    pytest.mark.flaky(reruns=2),
    # sockets and loops that gradio leaves to the garbage collector
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
    found = []
    limits = PageLimits(pixels=1_000_000, size=2_000_000)
    close = serve(catalogue, limits, port=free_port(), started=found.append, wait=False)
    yield found[0]
    close()


def put(page, path):
    page.set_input_files("#wf-picture input[type=file]", path)


def drop(page):
    """A picture of one's own, and then the model for it."""
    put(page, PICTURE)
    says(page, "choose a model")
    page.locator("#wf-model input").fill("bundled:digits")
    page.keyboard.press("Enter")


def clear(page):
    page.locator("#wf-picture button[aria-label=Clear], #wf-picture button[aria-label='Remove Image']").first.click()


def type_in(page, sentence=SENTENCE):
    """A sentence of one's own, in place of the example that is there at first."""
    page.get_by_label("a sentence").check()
    page.locator(".wf-word").first.wait_for()  # of the example
    finished(page)
    page.locator("#wf-sentence textarea").fill(sentence)
    page.locator("#wf-sentence textarea").blur()
    says(page, "Ready")


def pick(page, box, *names):
    """Choose from a list by typing, as the keyboard does it. An answer that arrives meanwhile may close the list: again."""
    for name in names:
        field, option = page.locator(f"{box} input"), page.locator(f"{box} [role=option]").first
        for patience in (5_000, 10_000, None):
            field.blur()
            field.click()
            field.fill(name)
            try:
                option.wait_for(timeout=patience)
                break
            except playwright.TimeoutError:
                if patience is None:
                    raise
        page.keyboard.press("Enter")
        field.blur()


def instead(page, name):
    """A method in place of the one that is chosen at first."""
    page.locator("#wf-methods input").focus()
    page.keyboard.press("Backspace")
    pick(page, "#wf-methods", name)


def explain(page):
    page.get_by_role("button", name="Explain", exact=True).click()
    finished(page)


def finished(page):
    page.wait_for_function("document.querySelector('#wf-status')?.innerText.includes('in all')")


def says(page, words):
    page.locator("#wf-status").get_by_text(words).wait_for()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_the_page_opens_with_an_answer_and_shows_others_in_one_click(site, visit, size, shoot):
    page = visit(site, *size)
    picture, around = page.locator(".wf-map").first.bounding_box(), page.locator(".wf-stored").bounding_box()
    assert 0 < around["y"] < picture["y"]
    assert picture["y"] + picture["height"] < size[1]
    assert page.evaluate("scrollY") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert "deit-tiny" in page.locator(".wf-stored").inner_text()
    shoot(page, f"app-opened-{size[0]}")
    for kind, part in (("a sentence", ".wf-word"), ("an answer", ".wf-generated"), ("a picture", ".wf-stored")):
        page.get_by_label(kind).check()
        page.locator(part).first.wait_for()
    assert "kind=" not in page.url  # a reload shows the stored example as well


def test_an_address_with_a_view_shows_that_instead_of_the_example(site, visit):
    page = visit(f"{site}#kind=text&sentence=Warm+and+funny.&methods=gae")
    page.locator(".wf-word").first.wait_for()
    finished(page)
    assert page.locator(".wf-stored").count() == 0
    assert page.locator("#wf-model input").input_value().startswith("bundled:sst2")
    page.locator("#wf-model input").click()  # and a list that is left as it was changes nothing
    page.keyboard.press("Tab")
    page.locator("#wf-methods input").click()
    assert page.locator("#wf-status").inner_text().endswith("in all.")
    assert page.locator(".wf-word").count() > 2
    first = page.locator("#wf-methods [role=option]").first
    assert "auto" in first.inner_text()
    said = [first.evaluate(f"(one) => getComputedStyle(one, '::{place}').content") for place in ("before", "after")]
    assert said[0] == '"Try first"'
    assert "measured best" in said[1]


def test_a_click_on_the_picture_chooses_another(site, visit):
    page = visit(site)
    with page.expect_file_chooser() as choice:
        page.locator("#wf-picture img").click()
    choice.value.set_files(PICTURE)
    says(page, "choose a model")
    assert page.locator(".wf-stored").count() == 0


def test_drop_a_picture_choose_explain_and_compare(site, visit, shoot):
    page = visit(site)
    drop(page)
    page.get_by_text("The model says").wait_for()
    assert page.locator(".wf-says li").count() == 5
    pick(page, "#wf-methods", "rollout")
    page.locator("#wf-classes input").click()
    assert re.match(r"3 \(99\.\d %\)", page.locator("#wf-classes [role=option]").first.inner_text().strip("✓ \n"))
    page.keyboard.press("Escape")
    pick(page, "#wf-classes", "3", "7")
    explain(page)
    assert page.locator(".wf-map").count() == 3  # rollout is one map for any class
    assert page.locator(".wf-chart").count() == 4  # of each method and class
    assert "Better than each random map" in page.locator("#wf-trust").inner_text()
    assert "rollout: the map is the same for every class" in page.locator("#wf-trust").inner_text()
    shoot(page, "app-picture")


def test_values_are_read_by_pointer_and_by_keyboard(site, visit):
    page = visit(site)
    drop(page)
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


def test_type_a_sentence_and_click_a_word(site, visit, shoot):
    page = visit(site)
    type_in(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "integrated")
    pick(page, "#wf-classes", "neg", "pos")
    explain(page)
    assert page.locator(".wf-text[role=group]").count() == 3  # the colours of one method's two classes are opposite
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


def test_settings_come_with_the_method_and_change_the_view(site, visit, catalogue):
    page = visit(site)
    drop(page)
    page.get_by_text("The model says").wait_for()
    instead(page, "transformer_attribution")
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
        finished(page)
        assert page.locator(".wf-map").first.get_attribute("data-values") != first
        before = len(ran)
        page.locator("#wf-opacity input[type=range]").focus()
        for _ in range(4):
            page.keyboard.press("ArrowLeft")
        page.locator("#wf-opacity input[type=range]").dispatch_event("pointerup")
        page.locator("#wf-code").get_by_text("--opacity 0.8").first.wait_for()
        page.get_by_label("only what matters").check()
        page.locator(".wf-cell").get_by_text("the 20 % with the highest scores").wait_for()
        assert len(ran) == before  # drawn again, not computed again
    finally:
        handle.remove()
    pick(page, "#wf-methods", "smoothgrad")
    page.locator("[data-method=smoothgrad][data-key=noise]").wait_for(state="attached")
    assert page.locator("[data-method=transformer_attribution][data-key=start_layer]").input_value() == "1"


def test_keep_what_is_shown(site, visit):
    page = visit(site)
    drop(page)
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


def test_a_photograph_asks_for_a_model_first(site, visit, tmp_path):
    """The model that the page begins with reads digits: of a photograph it would say "4: 98.6 %"."""
    Image.effect_noise((320, 240), 60).convert("RGB").save(tmp_path / "photo.png")
    page = visit(site)
    put(page, tmp_path / "photo.png")
    says(page, "choose a model")
    assert page.locator("#wf-model input").input_value() == ""
    page.get_by_role("button", name="Explain", exact=True).click()
    says(page, "choose a model")
    assert page.locator(".wf-stored").count() == 0
    assert page.locator(".wf-map").count() == 0
    page.locator(".wf-example").first.click()  # which the model of the examples knows
    page.get_by_text("The model says").wait_for()
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_errors_are_sentences_and_the_page_goes_on(site, visit, tmp_path, shoot):
    page = visit(site)
    clear(page)
    page.get_by_role("button", name="Explain", exact=True).click()
    says(page, "there is no picture yet")
    (tmp_path / "note.png").write_text("no picture at all")
    put(page, tmp_path / "note.png")
    says(page, "note.png is not a picture")
    clear(page)
    Image.new("RGB", (1500, 1000)).save(tmp_path / "large.png")
    put(page, tmp_path / "large.png")
    says(page, "1 megapixels")
    page.reload()
    drop(page)
    page.get_by_text("The model says").wait_for()
    page.locator("#wf-model input").fill("../../etc")
    page.keyboard.press("Enter")
    says(page, "no model id")
    page.locator("#wf-model input").fill("nobody/nothing")
    page.keyboard.press("Enter")
    says(page, "cannot load 'nobody/nothing'")
    page.locator("#wf-model input").fill("bundled:sst2")
    page.keyboard.press("Enter")
    says(page, "reads text")
    shoot(page, "app-error")
    page.locator("#wf-model input").fill("bundled:digits")
    page.keyboard.press("Enter")
    page.get_by_text("The model says").wait_for()
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_an_upload_that_is_too_large_is_refused(site, visit, tmp_path):
    (tmp_path / "huge.bmp").write_bytes(b"BM" + bytes(2_500_000))
    page = visit(site)
    put(page, tmp_path / "huge.bmp")
    page.get_by_text(re.compile("maximum allowed size|too large|exceeds", re.I)).first.wait_for()
    assert page.get_by_text("The model says").count() == 0


def explaining_for_long(site, visit):
    """A page on which maps of three methods are being computed."""
    page = visit(site)
    drop(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "occlusion", "vit_cx")
    page.get_by_role("button", name="Explain", exact=True).click()
    says(page, re.compile("maps …|Reading"))
    return page


def test_cancel_ends_long_work(site, visit):
    page = explaining_for_long(site, visit)
    page.get_by_role("button", name="Cancel").click()
    says(page, "Cancelled.")
    page.wait_for_timeout(500)
    assert page.locator("#wf-status").inner_text().strip() == "Cancelled."
    explain(page)
    assert page.locator(".wf-map").count() == 3


@pytest.mark.parametrize("change", ["example", "clear"])
def test_a_new_input_ends_what_runs(site, visit, change):
    page = explaining_for_long(site, visit)
    if change == "example":
        page.locator(".wf-example").nth(1).click()
        says(page, "Ready")
    else:
        clear(page)
        says(page, "no picture yet")
    assert page.locator(".wf-map").count() == 0
    if change == "clear":
        put(page, PICTURE)
        says(page, "Ready")
    explain(page)
    assert page.locator(".wf-map").count() == 3


@contextmanager
def waiting_for_another(site, visit, catalogue):
    """A page whose Explain waits until the block ends, because that of another visitor runs."""
    busy, waiting = visit(site), visit(site)
    for page in (busy, waiting):
        drop(page)
        page.get_by_text("The model says").wait_for()
    go_on = threading.Event()

    def held_up(*_):
        go_on.wait(HANG)

    handle = catalogue.load("bundled:digits").model.register_forward_pre_hook(held_up)
    try:
        busy.get_by_role("button", name="Explain", exact=True).click()
        says(busy, re.compile("maps? …|Reading"))
        waiting.get_by_role("button", name="Explain", exact=True).click()
        says(waiting, "Waiting")
        yield waiting
    finally:
        go_on.set()
        handle.remove()
    finished(busy)


def test_what_waits_in_the_queue_can_be_cancelled(site, visit, catalogue):
    with waiting_for_another(site, visit, catalogue) as page:
        page.get_by_role("button", name="Cancel").click()
        says(page, "Cancelled.")
    page.wait_for_timeout(500)
    assert page.locator(".wf-map").count() == 0
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_what_waits_for_an_input_that_was_left_does_not_begin(site, visit, catalogue):
    with waiting_for_another(site, visit, catalogue) as page:
        page.locator(".wf-example").nth(1).click()
    says(page, "Ready")
    page.wait_for_timeout(500)
    assert page.locator(".wf-map").count() == 0
    assert "Ready" in page.locator("#wf-status").inner_text()
    explain(page)
    assert page.locator(".wf-map").count() == 1


def test_a_reload_keeps_the_view_and_another_visitor_begins_afresh(site, visit):
    page = visit(site)
    drop(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "rollout")
    pick(page, "#wf-classes", "7")
    explain(page)
    before = [m.get_attribute("data-values") for m in page.locator(".wf-map").all()]
    assert page.url.endswith("classes=%237"), page.url
    other = visit(site)
    other.locator(".wf-stored").wait_for()
    page.reload()
    finished(page)
    assert [m.get_attribute("data-values") for m in page.locator(".wf-map").all()] == before
    assert page.locator(".wf-says li").count() == 5
    assert page.locator("#wf-picture img").count() == 1
    assert "rollout" in page.locator("#wf-methods").inner_text()
    page.locator("#wf-classes .token").get_by_text("7 (").wait_for()
    assert page.locator(".wf-stored").count() == 0
    assert "digits_37" not in other.locator("#wf-code").inner_text()
    page.goto("about:blank")
    page.goto(site)  # without what stands behind the #
    page.locator(".wf-stored").wait_for()
    assert page.locator(".wf-map").count() == 1


def test_a_reload_keeps_a_sentence_and_its_settings(site, visit):
    page = visit(site)
    type_in(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "transformer_attribution")
    page.get_by_role("button", name="Settings").click()
    page.locator("#wf-form summary").last.click()
    layer = page.locator("[data-key=start_layer]")

    def stays():  # what the model says of the sentence may arrive in between, and draws the settings anew
        layer.fill("1")
        layer.dispatch_event("change")
        page.wait_for_timeout(500)
        return layer.input_value() == "1"

    wait_for(stays, "the setting to stay")
    explain(page)
    page.locator("#wf-code").get_by_text("start_layer=1").first.wait_for()
    page.reload()
    finished(page)
    assert page.locator("#wf-sentence textarea").input_value() == SENTENCE
    assert page.get_by_label("a sentence").is_checked()
    assert "start_layer=1" in page.locator("#wf-code").inner_text()
    assert page.locator("[data-key=start_layer]").input_value() == "1"
    explain(page)  # with what the form says
    assert "start_layer=1" in page.locator("#wf-code").inner_text()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_an_example_is_explained_without_scrolling(site, visit, size, shoot):
    page = visit(site, *size)
    page.locator(".wf-example").nth(1).click()
    page.get_by_text("The model says").wait_for()
    area = page.locator("#wf-explain").bounding_box()
    assert area["y"] + area["height"] < size[1]
    assert page.evaluate("scrollY") == 0
    explain(page)
    picture, column = page.locator(".wf-map").first.bounding_box(), page.locator("#wf-answer").bounding_box()
    assert picture["width"] >= min(0.95 * column["width"] - 30, 0.79 * size[1])

    def at_rest_in_sight():
        before = page.locator(".wf-map").first.bounding_box()["y"]
        page.wait_for_timeout(300)
        return page.locator(".wf-map").first.bounding_box()["y"] == before < size[1]

    wait_for(at_rest_in_sight, "the map to come into sight, and the page to come to rest")
    shoot(page, f"app-example-{size[0]}")
    page.evaluate("scrollTo(0, 0)")
    page.get_by_label("a sentence").check()
    page.locator(".wf-word").first.wait_for()  # of the example
    finished(page)
    page.get_by_role("button", name="Warm, funny").click()
    page.wait_for_function("document.querySelector('#wf-sentence textarea').value === 'Warm, funny, and full of life.'")
    says(page, "Ready")
    assert page.locator("#wf-explain").bounding_box()["y"] < size[1] - 40


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
def test_a_bar_is_a_button_that_explains_its_class(site, visit, size):
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
    finished(page)
    assert not page.locator("#wf-cancel").is_visible()
    assert [bar.get_attribute("aria-pressed") for bar in bars.all()] == ["true", "true", "false", "false", "false"]
    assert page.locator("#wf-classes .token").count() == 2
    bars.nth(0).click()
    page.wait_for_function("document.querySelectorAll('.wf-map').length === 1")
    finished(page)
    assert f"“{bars.nth(1).locator('bdi').inner_text()}”" in page.locator(".wf-cell bdi").first.inner_text()
    page.locator(".wf-example").nth(1).click()  # another input: nothing is shown of the one before
    page.locator(".wf-map").wait_for(state="detached")
    assert not page.locator("#wf-more").is_visible()
    assert not page.locator("#wf-looks").is_visible()


def test_progress_stands_beside_everything(site, visit, monkeypatch):
    step = Watch.__call__

    def slowly(self, *work, **said):
        for item in step(self, *work, **said):
            time.sleep(0.1)  # on a fast machine it is gone before it can be seen
            yield item

    monkeypatch.setattr(Watch, "__call__", slowly)
    page = visit(site)
    drop(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "occlusion", "vit_cx")
    page.get_by_role("button", name="Explain", exact=True).click()
    # read at once, for soon it is gone
    areas = page.wait_for_function("""() => {
      if (!document.querySelector("#wf-progress .progress-bar")) return null;
      const seen = ["#wf-progress [data-testid=status-tracker]", "#wf-status p", "#wf-says h2", "#wf-explain"];
      return seen.map((one) => document.querySelector(one).getBoundingClientRect()).map((r) => [r.top, r.bottom]);
    }""").json_value()
    (top, bottom), *others = areas
    assert bottom > top + 20
    for above, below in others:
        assert above >= bottom or below <= top
    finished(page)
    assert not page.locator("#wf-progress").is_visible()


def test_when_the_server_goes_the_page_says_so(catalogue, visit, free_port, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")  # put back at the end for the server of the other tests
    port, found = free_port(), []
    close = serve(catalogue, port=port, started=found.append, wait=False)
    page = visit(found[0])
    page.locator("#wf-explain").wait_for()
    while not any("queue/data" in url for url in page.answered):  # nothing is awaited any more
        page.wait_for_timeout(100)
    assert page.locator(".wf-gone").count() == 0
    close()
    page.locator(".wf-gone").get_by_text("is gone").wait_for()
    close = serve(catalogue, port=port, started=found.append, wait=False)
    page.locator(".wf-gone").get_by_text("started again").wait_for()
    page.get_by_role("link", name="Reload the page.").click()
    page.locator("#wf-explain").wait_for()
    assert page.locator(".wf-gone").count() == 0
    close()


def test_a_local_folder_is_offered_by_name(site, visit):
    page = visit(site)
    drop(page)
    page.get_by_text("The model says").wait_for()
    page.locator("#wf-model input").click()
    page.get_by_role("option", name="folder:my-digits").click()
    explain(page)
    assert "my-digits" in page.locator(".wf-code").first.inner_text()


def focused(page):
    return page.evaluate("document.activeElement.value || document.activeElement.innerText")


def tab_to(page, reached):
    """Press Tab until ``reached`` says so."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if reached():
            return
    raise AssertionError(f"40 times Tab end on {focused(page)!r}")


def test_by_keyboard_alone(site, visit):
    page = visit(site)
    page.locator("#wf-explain").wait_for()
    tab_to(page, lambda: focused(page) == "text")
    page.keyboard.press("Space")
    page.locator("#wf-sentence textarea").wait_for()
    finished(page)
    tab_to(page, lambda: page.evaluate("document.activeElement.tagName") == "TEXTAREA")
    page.keyboard.press("Control+A")
    page.keyboard.type("Warm, funny, and charming.")
    page.keyboard.press("Tab")
    page.wait_for_function("document.querySelector('#wf-says').innerText.includes('positive')")
    tab_to(page, lambda: focused(page) == "Explain")
    page.keyboard.press("Enter")
    finished(page)
    assert page.locator(".wf-word").count() > 5


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone(site, visit, dark, shoot):
    page = visit(site, 390, 844, dark, has_touch=True, is_mobile=True)
    drop(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "rollout")
    explain(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert all(box["width"] > 250 for box in (m.bounding_box() for m in page.locator(".wf-map").all()))
    shoot(page, f"app-phone-picture-{'dark' if dark else 'light'}")
    type_in(page)
    page.wait_for_function("document.querySelector('#wf-says').innerText.includes('positive')")
    explain(page)
    page.locator(".wf-word").nth(2).tap()
    page.locator(".wf-attended").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    shoot(page, f"app-phone-sentence-{'dark' if dark else 'light'}")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_serious_for_axe(site, visit, axe, dark, shoot):
    page = visit(site, dark=dark)
    page.locator("#wf-explain").wait_for()
    assert axe(page) == []
    drop(page)
    page.get_by_text("The model says").wait_for()
    pick(page, "#wf-methods", "rollout")
    page.get_by_role("button", name="Settings").click()
    for summary in page.locator("#wf-form summary").all():
        summary.click()
    explain(page)
    assert axe(page) == []
    shoot(page, f"app-axe-{'dark' if dark else 'light'}")
    type_in(page)
    page.wait_for_function("document.querySelector('#wf-says').innerText.includes('positive')")
    explain(page)
    page.locator(".wf-word").nth(2).click()
    page.locator(".wf-attended").wait_for()
    assert axe(page) == []
    page.locator("#wf-model input").fill("../../etc")
    page.keyboard.press("Enter")
    says(page, "no model id")
    assert axe(page) == []
