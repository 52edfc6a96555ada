"""The report in a browser: requests, console, sorting, filtering, printing, themes, narrow screens, no scripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apps.report.builders import benchmark_report, build_folder, with_names
from show.builders import ATTACK, picture, sentence
from whyformer.apps.report import write_report


@pytest.fixture
def report(tmp_path: Path) -> str:
    return write_report(build_folder(tmp_path / "in"), tmp_path / "report.html").path.as_uri()


def expand_table(page) -> None:
    page.get_by_text("Table of all maps").click()


def rows(page, table: str = "All maps") -> list[list[str]]:
    """Cell texts of the visible rows."""
    visible = page.get_by_role("region", name=table).locator("tbody tr:visible")
    return [visible.nth(i).locator("td").all_inner_texts() for i in range(visible.count())]


def column(page, index: int, table: str = "All maps") -> list[str]:
    return [row[index] for row in rows(page, table)]


def test_report_opens_without_requests_or_console_errors(page, report):
    page.goto(report)
    assert [address for address in page.requested if not address.startswith("data:")] == [report]
    assert page.console_errors == []
    assert page.get_by_role("heading", name="Explanations").is_visible()
    widths = page.eval_on_selector_all("img", "images => images.map(image => image.naturalWidth)")
    assert len(widths) == 6 + 4  # six images and the thumbnails of two pictures and their maps
    assert min(widths) > 0


def shares(page) -> list[float]:
    return [float(text.rpartition("(")[2].removesuffix(" %)")) for text in column(page, 3)]


def test_columns_sort_in_both_directions(page, report):
    page.goto(report)
    expand_table(page)
    before = column(page, 3)
    button = page.get_by_role("region", name="All maps").get_by_role("button", name="target (p)", exact=True)
    button.click()
    shown = shares(page)
    assert shown == sorted(shown)
    assert len(set(shown)) > 1
    assert column(page, 3) != before or before == sorted(before)
    button.focus()
    page.keyboard.press("Enter")
    assert shares(page) == sorted(shown, reverse=True)
    assert page.locator('th[aria-sort="descending"]').inner_text().startswith("target (p)")


def test_figures_sort_numerically_with_missing_values_last(page, report):
    page.goto(report)
    table = "Agreement with the mask"
    region = page.get_by_role("region", name=table)
    region.get_by_role("button", name="gae").click()
    assert [text.split()[0] for text in column(page, 2, table)] == ["9.25", "70.00"]
    for _ in range(2):
        region.get_by_role("button", name="rollout").click()
        assert [text.split()[0] for text in column(page, 1, table)] == ["61.50", "–"]


def test_filters_hide_rows_maps_and_cards(page, report):
    page.goto(report)
    expand_table(page)
    assert page.locator("article:visible").count() == 5
    tiles = page.locator(".sheet li:visible")
    assert tiles.count() == 4
    page.get_by_role("combobox", name="Method").select_option("rollout")
    assert set(column(page, 2)) == {"rollout"}
    assert page.locator("figure:visible figcaption").count() == 2
    assert page.locator("#explanations article:visible").count() == tiles.count() == 2
    assert page.locator("output").inner_text() == "2 of 6 maps"
    page.get_by_role("combobox", name="Model").select_option("tiny-bert")
    assert len(rows(page)) == 1
    page.get_by_role("button", name="Show all").click()
    assert len(rows(page)) == 6
    page.get_by_role("searchbox", name="Text").fill("CHARMING film")
    assert len(rows(page)) == 2
    page.get_by_role("searchbox", name="Text").fill("nothing like it")
    assert page.locator("#explanations article:visible").count() == 0
    assert page.locator("output").inner_text() == "0 of 6 maps"
    page.keyboard.press("Enter")  # the form must not be submitted
    assert page.url.startswith("file:")
    page.get_by_role("searchbox", name="Text").fill("")
    page.get_by_role("combobox", name="Class").select_option("cat")
    assert {text.partition(" (")[0] for text in column(page, 3)} == {"cat"}


def test_all_controls_are_reachable_by_keyboard(page, report):
    page.goto(report)
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.dataset.filter ?? '')").strip())
    assert {"A", "INPUT text", "SELECT method", "SELECT class", "SELECT model", "BUTTON", "SUMMARY", "DIV"} <= reached


def test_printing_shows_everything_and_no_controls(page, report, screenshots):
    page.goto(report)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("details:not([open])").count() == 0
    assert not page.locator(".filters").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") in ("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)")
    assert page.evaluate("[...document.querySelectorAll('.wide')].every(box => getComputedStyle(box).maxHeight === 'none')")
    paper = page.pdf(path=screenshots / "report.pdf", print_background=True)
    assert paper.startswith(b"%PDF")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def brightness(page, selector: str, property: str) -> float:
    colour = page.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{property}")
    return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_colour_scheme(page, report, screenshots, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(report)
    paper, ink = brightness(page, "body", "backgroundColor"), brightness(page, "body", "color")
    assert (paper > 200 > 60 > ink) if scheme == "light" else (paper < 60 < 200 < ink)
    page.screenshot(path=screenshots / f"report-{scheme}.png", full_page=True)


@pytest.mark.parametrize("width", [320, 390, 700])
def test_narrow_screens_scroll_down_only(page, report, screenshots, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=screenshots / f"report-{width}.png", full_page=True)


def test_report_is_readable_without_javascript(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report)
    assert not page.locator(".filters").is_visible()
    assert page.locator("article").count() == 5
    assert page.locator("[data-sort]:enabled").count() == 0
    page.locator("article summary").first.click()
    assert page.get_by_text("start_layer=0").first.is_visible()
    context.close()


def test_hostile_names_run_no_script(page, tmp_path):
    attack = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    labels = {0: attack, 1: attack, 2: ATTACK}
    with_names(sentence(f"{attack} {ATTACK}", labels=labels), attack, attack).save(tmp_path / "a.safetensors")
    with_names(picture(labels=labels), ATTACK, attack).save(tmp_path / "b.safetensors")
    replace(benchmark_report(attack), remarks=(attack,), conventions={attack: attack}).write(tmp_path)
    page.goto(write_report(tmp_path, tmp_path / "r.html", title="safe").path.as_uri())
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("combobox", name="Class").select_option(attack)
    assert page.title() == "safe"
    assert page.console_errors == []
    assert [address for address in page.requested if not address.startswith(("data:", "file:"))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_serious_violations(page, report, axe, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(report)
    page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    assert axe(page) == []


def test_tile_links_to_aligned_maps(page, tmp_path):
    long = "a name of a class that is far too long for the line that it stands on, " * 3
    for method, target in (("rollout", 0), ("transformer_attribution", 1), ("gae", 1)):
        e = with_names(picture(labels={0: "cat", 1: long, 2: "emu"}, target=target), "tiny-vit", method)
        e.save(tmp_path / f"{method}.safetensors")
    page.goto(write_report(tmp_path, tmp_path / "report.html").path.as_uri())
    page.locator(".sheet a").click()
    assert page.evaluate("document.querySelector(':target').tagName") == "ARTICLE"
    tops = page.eval_on_selector_all(".tiles figure", "all => all.map(f => f.querySelector('img').getBoundingClientRect().top - f.getBoundingClientRect().top)")
    assert len(tops) == 3
    assert max(tops) - min(tops) < 1
    figure = page.locator(".tiles figcaption .n").last
    assert figure.bounding_box()["width"] > 20  # the name is shortened, not the probability
