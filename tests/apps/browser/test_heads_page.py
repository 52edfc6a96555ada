"""The page of attention heads in a browser: selection of blocks and heads, hovering over tokens."""

import re

import pytest
from typer.testing import CliRunner

from whyformer.apps.cli import app

pytestmark = pytest.mark.slow
SENTENCE = "A charming film, though it drags."


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    out = tmp_path_factory.mktemp("heads")
    result = CliRunner().invoke(app, ["attention", SENTENCE, "--format", "html", "--out", str(out)])
    assert result.exit_code == 0, result.output
    (file,) = out.iterdir()
    return file.as_uri()


def test_hovered_token_shows_attention_of_selected_block_and_heads(page, address, screenshots):
    import whyformer

    maps = whyformer.attention_maps("bundled:sst2", SENTENCE)
    page.goto(address)
    page.locator("#from button", has_text="charming").hover()
    status = page.locator("#said").inner_text()
    names = maps.tokens[0]
    row = maps.maps[0][0, 0, names.index("charming")]
    best = int(row.argmax())
    assert status.startswith(f"“charming” looks at “{names[best]}” {100 * float(row[best]):.1f} %")
    assert page.locator("#lines line").count() == int((row > 0.01 * maps.maps[0][0].max()).sum())
    page.get_by_label("Block").select_option("2")
    page.get_by_role("button", name="all", exact=True).click()
    page.locator("#to button", has_text="drags").click()
    page.mouse.move(1, 1)
    column = maps.maps[2][0].mean(0)[:, names.index("drags")]
    match = re.match(r"“drags” is looked at by “([^”]+)” ([\d.]+) %", page.locator("#said").inner_text())
    assert match[1] == names[int(column.argmax())]
    assert float(match[2]) == pytest.approx(100 * float(column.max()), abs=0.06)
    page.screenshot(path=screenshots / "heads.png")
    page.reload()  # the selection is part of the address
    assert page.get_by_label("Block").input_value() == "2"
    assert page.locator("#said").inner_text().startswith("“drags” is looked at by")
    assert page.console_errors == []
    assert [a for a in page.requested if not a.startswith(("file:", "data:"))] == []


def test_keyboard_navigation_on_narrow_screen(page, address, axe):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#from button").nth(1).focus()
    page.keyboard.press("Tab")
    assert page.locator("#said").inner_text().startswith("“charming” looks at")
    page.keyboard.press("Enter")
    page.locator("#block").focus()
    assert page.locator("#said").inner_text().startswith("“charming” looks at")
    page.keyboard.press("Escape")
    assert page.locator("#said").inner_text().startswith("Block 0")
    assert axe(page) == []
