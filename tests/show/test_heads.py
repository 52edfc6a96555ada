"""The page of heads has the values of the maps, and requests nothing."""

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


def held(page, tokens):
    """``[blocks, H, N, N]`` from the page."""
    found = re.findall(r'data-heads="(\d+)" data-largest="([^"]+)" value="([^"]+)"', page)
    return [np.frombuffer(base64.b64decode(b), "<u2").reshape(int(h), tokens, tokens) / 65535 * float(top) for h, top, b in found]


@pytest.mark.parametrize("sample", [0, 1, -1])
def test_it_holds_the_shares_of_its_sample(maps, sample):
    names = maps.tokens[sample]
    page = show.heads(maps, sample)
    assert re.findall(r'data-token="\d+"><bdi>([^<]*)</bdi>', page) == [*names, *names]
    blocks = held(page, len(names))
    assert len(blocks) == maps.blocks
    for own, there in zip(maps.maps, blocks, strict=True):
        own = own[sample, :, : len(names), : len(names)].numpy()
        assert np.abs(own - there).max() <= 0.51 / 65535 * own.max()
        np.testing.assert_allclose(there.sum(-1), 1, atol=1e-3)  # nothing is left to padding


def test_it_asks_for_nothing_and_escapes(maps):
    attack = "</script><img src=x onerror=alert(1)>\u202e"
    page = show.heads(whyformer.attention_maps("bundled:sst2", attack + SENTENCE), title=attack)
    assert "<img" not in page
    assert "\u202e" not in page
    assert not re.search(r"<[a-z][^<>]* (src|href)=", page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "default-src 'none'" in page


def test_weighted_by_a_gradient_it_speaks_of_a_class():
    plain, weighted = (show.heads(whyformer.attention_maps("bundled:sst2", SENTENCE, gradient=g, target="negative" if g else None)) for g in (False, True))
    assert "for no class" in plain
    assert "for no class" not in weighted
    assert "gradient of <bdi>negative" in weighted


def test_what_it_refuses(maps, monkeypatch):
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
