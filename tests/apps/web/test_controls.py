"""The form of settings is built from the registry for every method, and parses to the same settings."""

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
def test_every_setting_has_labeled_field(method, blocks):
    form = controls.form([method.name], {}, blocks)
    assert {key for _, key in FIELD.findall(form)} == set(method.settings)
    fields = len(re.findall(r"<(?:input|select)", form))
    assert form.count("<label") == fields


def parse_form(form):
    """The settings that page.js collects from an unchanged form."""
    result = {}
    for tag, attributes, inner in re.findall(r"<(input|select)([^>]*)>((?:<option.*?</option>)*)", form):
        attrs = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        settings = result.setdefault(attrs["data-method"], {})
        if tag == "select":
            chosen = re.findall(r'<option value="([^"]*)" selected', inner) or re.findall(r'<option value="([^"]*)"', inner)
            value = json.loads(unescape(chosen[0]))
        elif attrs["type"] == "checkbox":
            value = " checked" in attributes
        elif attrs["type"] in ("number", "range"):
            value = float(attrs["value"])
            value = int(value) if value.is_integer() else value
        else:
            value = json.loads(unescape(attrs["value"])) if attrs["value"] else None
        if "data-part" in attrs:
            settings.setdefault(attrs["data-key"], None)
            if value is not None:
                settings[attrs["data-key"]] = {**(settings[attrs["data-key"]] or {}), attrs["data-part"]: value}
        else:
            settings[attrs["data-key"]] = value
    return result


@pytest.mark.part
@pytest.mark.parametrize("method", list_methods(), ids=lambda m: m.name)
@pytest.mark.parametrize("blocks", [0, 4])
def test_unchanged_form_has_default_settings(method, blocks):
    assert controls.changed(method.name, parse_form(controls.form([method.name], {}, blocks)).get(method.name, {}), blocks) == {}


def test_form_shows_chosen_settings():
    settings = {"rollout": {"head_fusion": "max", "start_layer": 2, "discard_ratio": 0.25, "normalize_rows": False, "aggregation": {"rows": "column_max"}}}
    assert controls.changed("rollout", parse_form(controls.form(["rollout"], settings, 4))["rollout"], 4) == settings["rollout"]


def test_form_has_bounds_and_choices_of_registry():
    form = controls.form(["transformer_attribution", "integrated_gradients"], {}, 7)
    assert re.search(r'type="range" min="0" max="6" step="1" value="0"[^>]*data-key="start_layer"', form)
    assert re.search(r'type="number" step="1" min="1" max="1000" value="50"[^>]*data-key="steps"', form)
    assert all(f">{choice}</option>" in form for choice in ("gradient", "attention", "zero", "blur"))


def test_default_negative_block_equals_its_positive_index():
    assert controls.changed("gradcam_attention", {"block": 3}, 4) == {}
    assert controls.changed("gradcam_attention", {"block": 2}, 4) == {"block": 2}


@pytest.mark.parametrize("raw", ["no json", "[1]", '{"rollout": 3}', 5])
def test_malformed_settings_raise(raw):
    with pytest.raises(InputError):
        controls.read_form(raw)


def test_setting_out_of_range_raises():
    with pytest.raises(InputError, match="head_fusion must be"):
        controls.changed("rollout", {"head_fusion": "<script>"}, 4)


def test_settings_are_escaped_in_form():
    assert "<script>" not in controls.form(["gradcam"], {"gradcam": {"blocks": "<script>"}}, 4)
