"""Typical first calls: lists of methods, inputs of all forms, models by name, error messages, long texts."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import whyformer
from show.builders import sentence
from whyformer import show
from whyformer.errors import InputError, LoadError
from whyformer.models import loading
from whyformer.targets import class_index

PICTURE = Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png"
SENTENCE = "A charming film, though it drags."


def run_python(code):
    """Run code in a new Python process; return whether torch was imported, and standard output."""
    tail = "\nimport sys; sys.stdout.flush(); print('torch' in sys.modules, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True)
    return completed.stderr.split()[-1] == "True", completed.stdout


def test_listing_methods_imports_no_torch():
    torch_imported, output = run_python("from whyformer.apps.cli import app\ntry:\n    app(['methods'])\nexcept SystemExit:\n    pass")
    assert not torch_imported
    assert "transformer_attribution" in output


def test_reprs_are_tables():
    listed = repr(whyformer.list_methods())
    assert len(listed.splitlines()) == len(whyformer.list_methods())
    assert "rollout" in listed
    assert "Method(" not in listed
    maps = repr(whyformer.attention_maps("bundled:sst2", SENTENCE))
    assert maps.startswith("AttentionMaps of 1 sample: 3 blocks")
    assert "tensor(" not in maps
    comparison = repr(whyformer.compare("bundled:sst2", SENTENCE, ["rollout", "saliency", "vit_cx"], ["positive"]))
    assert "any class" in comparison
    assert "refused: vit_cx" in comparison
    assert "tensor(" not in comparison


# -- inputs --------------------------------------------------------------------------------------------------------
def test_picture_of_any_type_has_same_scores():
    expected = whyformer.explain("bundled:digits", Image.open(PICTURE)).scores
    pixels = np.asarray(Image.open(PICTURE).convert("RGB"))
    for picture in (str(PICTURE), PICTURE, pixels, [PICTURE], [pixels]):
        assert torch.equal(whyformer.explain("bundled:digits", picture).scores, expected)
    both = whyformer.explain("bundled:digits", [PICTURE, str(PICTURE)])
    assert len(both) == 2


def test_numpy_arrays_are_accepted_as_pixel_values():
    loaded = loading.load("bundled:digits")
    pixels = loaded.processor(images=[Image.open(PICTURE).convert("RGB")], return_tensors="np")["pixel_values"]
    assert whyformer.explain(loaded.model, pixels).scores.shape == (1, 196)


def test_processor_is_loaded_from_name_of_model():
    for name, input_ in (("bundled:digits", PICTURE), ("bundled:sst2", SENTENCE)):
        model = loading.load(name).model
        assert torch.equal(whyformer.explain(model, input_).scores, whyformer.explain(name, input_).scores)
    with pytest.raises(InputError, match="needs the model's tokenizer"):
        whyformer.explain(torch.nn.Linear(2, 2).eval(), SENTENCE)


@pytest.mark.parametrize(("name", "wrong", "remedy"), [("bundled:digits", SENTENCE, "the kind"), ("bundled:sst2", PICTURE, "pass a text")])
def test_input_of_another_kind_than_the_processor_reads_names_the_right_kind(name, wrong, remedy):
    for processor in (None, loading.load(name).processor):
        with pytest.raises(InputError, match=remedy):
            whyformer.explain(name, wrong, processor=processor)


@pytest.mark.parametrize("kind", ["pipeline", "Trainer"])
def test_pipelines_and_trainers_equal_their_model_and_tokenizer(kind, tmp_path):
    loaded = loading.load("bundled:sst2")
    if kind == "pipeline":
        holder = transformers.pipeline("text-classification", model=loaded.model, tokenizer=loaded.processor, device="cpu")
    else:
        arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        holder = transformers.Trainer(loaded.model, arguments, processing_class=loaded.processor)
    e = whyformer.explain(holder, SENTENCE, target="positive")
    assert e.model == "bundled:sst2"
    assert torch.equal(e.scores, whyformer.explain("bundled:sst2", SENTENCE, target="positive").scores)


def test_model_given_by_name_is_loaded_once_without_output(monkeypatch, capfd):
    whyformer.unload()
    original, calls = loading.load, []
    monkeypatch.setattr(loading, "load", lambda *a, **k: calls.append(a) or original(*a, **k))
    for _ in range(3):
        whyformer.explain("bundled:sst2", SENTENCE)
    assert len(calls) == 1
    whyformer.unload()
    whyformer.explain("bundled:sst2", SENTENCE)
    assert len(calls) == 2
    assert "Loading" not in capfd.readouterr().err


def test_changed_local_model_is_reloaded(tmp_path):
    loaded = loading.load("bundled:sst2")
    loaded.model.save_pretrained(tmp_path)
    loaded.processor.save_pretrained(tmp_path)
    first = whyformer.explain(str(tmp_path), SENTENCE).logits
    with torch.no_grad():
        loaded.model.classifier.bias += 5
    loaded.model.save_pretrained(tmp_path)
    assert not torch.equal(whyformer.explain(str(tmp_path), SENTENCE).logits, first)


# -- invalid arguments ---------------------------------------------------------------------------------------------
def test_function_as_method_and_folder_as_input_raise(tmp_path):
    with pytest.raises(InputError, match=r"method must be a name, such as 'rollout', not the object 'rollout'"):
        from whyformer.methods.maps.rollout import rollout

        whyformer.explain("bundled:sst2", SENTENCE, rollout)
    for folder in (tmp_path, str(tmp_path), [tmp_path]):
        with pytest.raises(InputError, match="is a folder: pass the files in it"):
            whyformer.explain("bundled:digits", folder)


def test_class_suggestions_begin_with_whole_words():
    labels = {0: "crate", 1: "tiger cat", 2: "Egyptian cat", 3: "catamaran", 4: "cattle", 5: "dog"}
    with pytest.raises(InputError, match="Did you mean 'tiger cat', 'Egyptian cat', "):
        class_index("cat", labels)


# -- long texts ----------------------------------------------------------------------------------------------------
def test_figure_of_long_text_is_bounded_in_time_and_size():
    words = [f"w{i}" for i in range(6000)]
    scores = torch.zeros(6002)
    scores[1 + 3000], scores[1 + 10] = 1.0, -0.5
    text = sentence(" ".join(words), scores)
    show.figure(sentence())
    calls = itertools.count()
    sys.setprofile(lambda *_: next(calls) and None)
    try:
        drawn = show.figure(text)
        data = show.encode(drawn)
    finally:
        sys.setprofile(None)
    assert next(calls) < 4_000_000  # profiler events (calls and returns): about a million, one second
    assert len(data) < 2_000_000
    content = " ".join(t.get_text() for t in drawn.texts)
    assert "w3000" in content
    assert "w10" in content
    assert "weaker words" in content
    assert drawn.get_size_inches()[1] < 20


def test_endless_word_is_truncated():
    drawn = show.figure(sentence("x" * 100_000))
    assert "(99,700 characters more)" in "".join(t.get_text() for t in drawn.texts).replace(" ", " ")
    assert len(drawn.texts) < 50


def test_missing_model_folder_raises():
    with pytest.raises(LoadError, match="no such folder"):
        whyformer.explain("./nowhere", SENTENCE)
