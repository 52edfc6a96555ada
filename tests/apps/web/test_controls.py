"""The form of settings: made from the registry for every method, and read back to the same settings."""

import json
import re
from html import unescape

import pytest

from whyformer.apps.web import controls
from whyformer.errors import InputError
from whyformer.methods import list_methods

FIELD = re.compile(r'<(?:input|select)[^>]*data-method="([^"]+)" data-key="([^"]+)"')


@pytest.mark.part
@pytest.mark.parametrize("method", list_methods(), ids=lambda m: m.name)
@pytest.mark.parametrize("blocks", [0, 4])
def test_every_setting_of_every_method_has_a_field_with_a_label(method, blocks):
    form = controls.form([method.name], {}, blocks)
    assert {key for _, key in FIELD.findall(form)} == set(method.settings)
    fields = len(re.findall(r"<(?:input|select)", form))
    assert form.count("<label") == fields


def read_back(form):
    """What page.js collects from a form that nobody touched."""
    found = {}
    for tag, attributes, inner in re.findall(r"<(input|select)([^>]*)>((?:<option.*?</option>)*)", form):
        given = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        own = found.setdefault(given["data-method"], {})
        if tag == "select":
            chosen = re.findall(r'<option value="([^"]*)" selected', inner) or re.findall(r'<option value="([^"]*)"', inner)
            value = json.loads(unescape(chosen[0]))
        elif given["type"] == "checkbox":
            value = " checked" in attributes
        elif given["type"] in ("number", "range"):
            value = float(given["value"])
            value = int(value) if value.is_integer() else value
        else:
            value = json.loads(unescape(given["value"])) if given["value"] else None
        if "data-part" in given:
            own.setdefault(given["data-key"], None)
            if value is not None:
                own[given["data-key"]] = {**(own[given["data-key"]] or {}), given["data-part"]: value}
        else:
            own[given["data-key"]] = value
    return found


@pytest.mark.part
@pytest.mark.parametrize("method", list_methods(), ids=lambda m: m.name)
@pytest.mark.parametrize("blocks", [0, 4])
def test_an_untouched_form_gives_the_defaults(method, blocks):
    assert controls.changed(method.name, read_back(controls.form([method.name], {}, blocks)).get(method.name, {}), blocks) == {}


def test_what_was_chosen_before_stands_in_the_form_again():
    given = {"rollout": {"head_fusion": "max", "start_layer": 2, "discard_ratio": 0.25, "normalize_rows": False, "aggregation": {"rows": "column_max"}}}
    assert controls.changed("rollout", read_back(controls.form(["rollout"], given, 4))["rollout"], 4) == given["rollout"]


def test_bounds_and_choices_are_those_of_the_registry():
    form = controls.form(["transformer_attribution", "integrated_gradients"], {}, 7)
    assert re.search(r'type="range" min="0" max="6" step="1" value="0"[^>]*data-key="start_layer"', form)
    assert re.search(r'type="number" step="1" min="1" max="1000" value="50"[^>]*data-key="steps"', form)
    assert all(f">{choice}</option>" in form for choice in ("gradient", "attention", "zero", "blur"))


def test_a_negative_block_is_the_same_as_its_positive_number():
    assert controls.changed("gradcam_attention", {"block": 3}, 4) == {}
    assert controls.changed("gradcam_attention", {"block": 2}, 4) == {"block": 2}


@pytest.mark.parametrize("raw", ["no json", "[1]", '{"rollout": 3}', 5])
def test_settings_that_are_none(raw):
    with pytest.raises(InputError):
        controls.read_form(raw)


def test_a_setting_out_of_range_is_refused_by_the_registry():
    with pytest.raises(InputError, match="head_fusion must be"):
        controls.changed("rollout", {"head_fusion": "<script>"}, 4)


def test_given_text_is_escaped():
    assert "<script>" not in controls.form(["gradcam"], {"gradcam": {"blocks": "<script>"}}, 4)
