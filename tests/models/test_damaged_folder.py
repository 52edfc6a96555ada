"""Model folders with damaged files load or raise WhyformerError, without hanging."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whyformer
from mutations import damaged, mutated
from whyformer.errors import LoadError, WhyformerError
from whyformer.models.loading import load
from zoo_evaluate import tiny_bert


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The files of a tiny BERT with its tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    for part in tiny_bert():
        part.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_folder(folder, saved, **changed):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in {**saved, **changed}.items():
        (folder / name).write_bytes(content)
    return str(folder)


@given(data=st.data())
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_damaged_model_files_load_or_raise(saved, data, tmp_path_factory):
    name = data.draw(st.sampled_from(sorted(saved)))
    if name.endswith(".json") and data.draw(st.booleans()):
        content = json.dumps(data.draw(mutated(json.loads(saved[name])))).encode()
    else:
        content = data.draw(damaged(saved[name]))
    folder = write_folder(tmp_path_factory.getbasetemp() / "damaged", saved, **{name: content})
    with contextlib.suppress(WhyformerError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of transformers about odd settings
        loaded = load(folder)
        e = whyformer.explain(loaded.model, "a good film", "rollout", processor=loaded.processor)
        assert e.scores.isfinite().all()


@pytest.mark.parametrize("changed", [{"num_hidden_layers": 10**9}, {"num_hidden_layers": "two"}, {"hidden_size": -1}, {"num_attention_heads": 0}])
def test_impossible_config_raises(saved, changed, tmp_path):
    config = json.dumps({**json.loads(saved["config.json"]), **changed}).encode()
    with pytest.raises(LoadError, match=r"cannot load|the config has"):
        load(write_folder(tmp_path / "odd", saved, **{"config.json": config}))
