"""What a new user meets first: lists at once, mistakes told at once, files and arrays and pipelines taken as they are."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import whyformer
from show.builders import sentence
from whyformer import show
from whyformer.errors import InputError, LoadError
from whyformer.models import loading
from whyformer.targets import class_index

PICTURE = Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png"
SENTENCE = "A charming film, though it drags."


def fresh(code):
    """(whether torch was imported, standard output) of a fresh Python."""
    tail = "\nimport sys; sys.stdout.flush(); print('torch' in sys.modules, file=sys.stderr)"
    made = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True)
    return made.stderr.split()[-1] == "True", made.stdout


def test_methods_are_listed_without_torch():
    torch_there, said = fresh("from whyformer.apps.cli import app\ntry:\n    app(['methods'])\nexcept SystemExit:\n    pass")
    assert not torch_there
    assert "transformer_attribution" in said


def test_what_is_printed_is_a_table():
    listed = repr(whyformer.list_methods())
    assert len(listed.splitlines()) == len(whyformer.list_methods())
    assert "rollout" in listed
    assert "Method(" not in listed
    maps = repr(whyformer.attention_maps("bundled:sst2", SENTENCE))
    assert maps.startswith("AttentionMaps of 1 sample: 3 blocks")
    assert "tensor(" not in maps
    compared = repr(whyformer.compare("bundled:sst2", SENTENCE, ["rollout", "saliency", "vit_cx"], ["positive"]))
    assert "any class" in compared
    assert "refused: vit_cx" in compared
    assert "tensor(" not in compared


# -- inputs --------------------------------------------------------------------------------------------------------
def test_pictures_in_any_form_give_the_same():
    wanted = whyformer.explain("bundled:digits", Image.open(PICTURE)).scores
    pixels = np.asarray(Image.open(PICTURE).convert("RGB"))
    for given in (str(PICTURE), PICTURE, pixels, [PICTURE], [pixels], (str(PICTURE),)):
        assert torch.equal(whyformer.explain("bundled:digits", given).scores, wanted)
    both = whyformer.explain("bundled:digits", [PICTURE, str(PICTURE)])
    assert len(both) == 2


def test_arrays_of_numbers_are_tensors():
    loaded = loading.load("bundled:digits")
    pixels = loaded.processor(images=[Image.open(PICTURE).convert("RGB")], return_tensors="np")["pixel_values"]
    assert whyformer.explain(loaded.model, pixels).scores.shape == (1, 196)


def test_the_processor_is_found_beside_the_model():
    for name, given in (("bundled:digits", PICTURE), ("bundled:sst2", SENTENCE)):
        model = loading.load(name).model
        assert torch.equal(whyformer.explain(model, given).scores, whyformer.explain(name, given).scores)
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        whyformer.explain(torch.nn.Linear(2, 2).eval(), SENTENCE)


def test_a_pipeline_is_taken_apart():
    import transformers

    loaded = loading.load("bundled:sst2")
    pipeline = transformers.pipeline("text-classification", model=loaded.model, tokenizer=loaded.processor, device="cpu")
    e = whyformer.explain(pipeline, SENTENCE, target="positive")
    assert e.model == "bundled:sst2"
    assert torch.equal(e.scores, whyformer.explain("bundled:sst2", SENTENCE, target="positive").scores)


def test_a_model_given_by_name_is_loaded_once_and_in_silence(monkeypatch, capfd):
    whyformer.unload()
    real, count = loading.load, []
    monkeypatch.setattr(loading, "load", lambda *a, **k: count.append(a) or real(*a, **k))
    for _ in range(3):
        whyformer.explain("bundled:sst2", SENTENCE)
    assert len(count) == 1
    whyformer.unload()
    whyformer.explain("bundled:sst2", SENTENCE)
    assert len(count) == 2
    assert "Loading" not in capfd.readouterr().err


def test_a_local_model_that_was_trained_on_is_loaded_again(tmp_path):
    loaded = loading.load("bundled:sst2")
    loaded.model.save_pretrained(tmp_path)
    loaded.processor.save_pretrained(tmp_path)
    first = whyformer.explain(str(tmp_path), SENTENCE).logits
    with torch.no_grad():
        loaded.model.classifier.bias += 5
    loaded.model.save_pretrained(tmp_path)
    assert not torch.equal(whyformer.explain(str(tmp_path), SENTENCE).logits, first)


# -- mistakes ------------------------------------------------------------------------------------------------------
def test_a_method_given_as_a_function_and_a_folder_as_input_are_told_at_once(tmp_path):
    with pytest.raises(InputError, match=r"method must be a name, such as 'rollout', not the object 'rollout'"):
        from whyformer.methods.maps.rollout import rollout

        whyformer.explain("bundled:sst2", SENTENCE, rollout)
    for given in (tmp_path, str(tmp_path), [tmp_path]):
        with pytest.raises(InputError, match="is a folder: pass the files in it"):
            whyformer.explain("bundled:digits", given)


def test_whole_words_come_first_in_a_search_for_a_class():
    labels = {0: "crate", 1: "tiger cat", 2: "Egyptian cat", 3: "catamaran", 4: "cattle", 5: "dog"}
    with pytest.raises(InputError, match="Did you mean 'tiger cat', 'Egyptian cat', "):
        class_index("cat", labels)


# -- long texts ----------------------------------------------------------------------------------------------------
def test_a_long_text_is_drawn_quickly_and_bounded():
    words = [f"w{i}" for i in range(6000)]
    scores = torch.zeros(6002)
    scores[1 + 3000], scores[1 + 10] = 1.0, -0.5
    text = sentence(" ".join(words), scores)
    show.figure(sentence())
    steps = itertools.count()
    sys.setprofile(lambda *_: next(steps) and None)
    try:
        drawn = show.figure(text)
        data = show.encode(drawn)
    finally:
        sys.setprofile(None)
    assert next(steps) < 4_000_000  # calls of functions and returns from them: a million, for about a second
    assert len(data) < 2_000_000
    said = " ".join(t.get_text() for t in drawn.texts)
    assert "w3000" in said
    assert "w10" in said
    assert "weaker words" in said
    assert drawn.get_size_inches()[1] < 20


def test_a_word_without_end_is_cut():
    drawn = show.figure(sentence("x" * 100_000))
    assert "(99,700 characters more)" in "".join(t.get_text() for t in drawn.texts).replace(" ", " ")
    assert len(drawn.texts) < 50


def test_a_missing_model_is_told_by_its_name():
    with pytest.raises(LoadError, match="no such folder"):
        whyformer.explain("./nowhere", SENTENCE)
