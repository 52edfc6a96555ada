"""The page of attention heads has the values of the maps, and loads nothing."""

import base64
import re

import numpy as np
import pytest
import torch

import whyformer
from whyformer import show
from whyformer.errors import InputError
from whyformer.show.html import heads as module

SENTENCE = "A charming film, though it drags."


@pytest.fixture(scope="module")
def maps():
    return whyformer.attention_maps("bundled:sst2", [SENTENCE, "Dull."])


def read_blocks(page, tokens):
    """Read the attention maps ``[blocks, H, N, N]`` from the page."""
    blocks = re.findall(r'data-heads="(\d+)" data-largest="([^"]+)" value="([^"]+)"', page)
    return [np.frombuffer(base64.b64decode(b), "<u2").reshape(int(h), tokens, tokens) / 65535 * float(top) for h, top, b in blocks]


@pytest.mark.parametrize("sample", [0, 1, -1])
def test_page_has_attention_of_sample(maps, sample):
    names = maps.tokens[sample]
    page = show.heads(maps, sample)
    assert re.findall(r'data-token="\d+"><bdi>([^<]*)</bdi>', page) == [*names, *names]
    blocks = read_blocks(page, len(names))
    assert len(blocks) == maps.blocks
    for expected, result in zip(maps.maps, blocks, strict=True):
        expected = expected[sample, :, : len(names), : len(names)].numpy()
        assert np.abs(expected - result).max() <= 0.51 / 65535 * expected.max()
        np.testing.assert_allclose(result.sum(-1), 1, atol=1e-3)  # padding has no share


def test_page_loads_nothing_and_is_escaped(maps):
    attack = "</script><img src=x onerror=alert(1)>\u202e"
    page = show.heads(whyformer.attention_maps("bundled:sst2", attack + SENTENCE), title=attack)
    assert "<img" not in page
    assert "\u202e" not in page
    assert not re.search(r"<[a-z][^<>]* (src|href)=", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_gradient_weighted_page_names_class():
    plain, weighted = (show.heads(whyformer.attention_maps("bundled:sst2", SENTENCE, gradient=g, target="negative" if g else None)) for g in (False, True))
    assert "for no class" in plain
    assert "for no class" not in weighted
    assert "gradient of <bdi>negative" in weighted


def test_invalid_maps_raise(maps, monkeypatch):
    with pytest.raises(InputError, match="no sample 2"):
        show.heads(maps, 2)
    with pytest.raises(InputError, match="for text"):
        show.heads(whyformer.attention_maps("bundled:digits", "examples/pictures/digits_37.png"))
    monkeypatch.setattr(module, "MOST_VALUES", 100)
    with pytest.raises(InputError, match="too many"):
        show.heads(maps)
    broken = whyformer.attention_maps("bundled:sst2", "A film.")
    broken.maps[0][0, 0, 0, 0] = torch.nan
    monkeypatch.undo()
    with pytest.raises(InputError, match="NaN"):
        show.heads(broken)
