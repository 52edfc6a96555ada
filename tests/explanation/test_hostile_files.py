"""Damaged, hostile or unwritable files raise LoadError with file and field, and leave no partial file."""

import errno
import json
import os
import pathlib
import threading

import pytest
import safetensors.torch
import torch

from show.builders import picture, sentence
from whyformer.apps.report import write_report
from whyformer.errors import InputError, LoadError
from whyformer.explanation.result import Explanation
from whyformer.inputs.argument import read_argument


def rewritten(path, change):
    """Rewrite a file of save() with changed metadata and tensors."""
    with safetensors.safe_open(str(path), "pt") as file:
        facts = json.loads(file.metadata()["whyformer"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(facts, tensors)
    safetensors.torch.save_file(tensors, path, {"whyformer": json.dumps(facts)})
    return path


CHANGES = {
    "tokens": lambda f, t: f.update(tokens="x"),
    "offsets": lambda f, t: f.update(offsets=[[["a", "b"]]]),
    "level": lambda f, t: f.update(level=3),
    "labels": lambda f, t: f.update(labels=[1, 2]),
    "extent": lambda f, t: f.update(extent=[[1]]),
    "unknown": lambda f, t: f.update(unknown=[["x"]]),
    "nonsense": lambda f, t: f.update(nonsense=1),
    "method": lambda f, t: f.pop("method"),
    "scores": lambda f, t: t.pop("scores"),
    "logits": lambda f, t: t.update(logits=torch.zeros(7, 2)),
    "target_names": lambda f, t: f.update(target_names=["a", "b", "c"]),
    "texts": lambda f, t: f.update(texts=["a", "b", "c"]),
}


@pytest.mark.parametrize("field", CHANGES)
def test_malformed_file_raises_with_name_and_field(tmp_path, field):
    path = rewritten(sentence("good bad", [0, 2.0, -1.0, 0]).save(tmp_path / "odd.safetensors"), CHANGES[field])
    with pytest.raises(LoadError, match=rf"odd\.safetensors.*{field}"):
        Explanation.load(path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 100, b'{"a": 1}', os.urandom(1000)])
def test_foreign_file_raises(tmp_path, content):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=r"odd\.safetensors"):
        Explanation.load(path)


def test_report_skips_bad_files(tmp_path):
    for field, change in CHANGES.items():
        rewritten(sentence("good bad", [0, 2.0, -1.0, 0]).save(tmp_path / f"{field}.safetensors"), change)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "report.json").write_text('{"benchmark": [], "figures": 3}')
    os.mkfifo(tmp_path / "pipe.json")
    picture().save(tmp_path / "good.safetensors")
    report = write_report(tmp_path, tmp_path / "report.html")
    assert report.explanations == 1
    assert {s.file for s in report.skipped if s.damaged} >= {f"{field}.safetensors" for field in CHANGES if field != "method"} | {"report.json"}


def test_report_opens_no_folder_named_in_a_file(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text('{"id2label": {"0": "stolen words"}, "architectures": ["Stolen"]}')
    (secret / "README.md").write_text("---\nlicense: stolen\n---")
    sources = tmp_path / "sources"
    sources.mkdir()
    for i, name in enumerate((str(secret), "../secret", f"bundled:../../{secret}", os.path.relpath(secret))):
        picture(model=name).save(sources / f"{i}.safetensors")
    report = write_report(sources, tmp_path / "report.html")
    assert report.explanations == 4
    assert "tolen" not in report.path.read_text()


def test_save_does_not_replace_a_pipe_or_device(tmp_path):
    """Root could replace a device such as /dev/full by a file."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    for path in (pipe, link, tmp_path):
        with pytest.raises(LoadError, match="a folder, a pipe or a device, not a file"):
            sentence().save(path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe"]


# -- writing ---------------------------------------------------------------------------------------------------------
def test_save_to_missing_folder_raises(tmp_path):
    with pytest.raises(LoadError, match="there is no folder"):
        sentence().save(tmp_path / "not" / "there.safetensors")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), safetensors.SafetensorError("I/O error: No space left on device")])
def test_full_disk_raises_and_leaves_no_file(tmp_path, monkeypatch, error):
    def full(path, content):
        path.write_text("half")
        raise error

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(LoadError, match=r"cannot write .*No space left"):
        sentence().save(tmp_path / "e.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_killed_write_leaves_the_file_unchanged(tmp_path, monkeypatch):
    path = sentence().save(tmp_path / "e.safetensors")
    before = path.read_bytes()

    def killed(partial, content):
        partial.write_text("half")
        os._exit(9)

    monkeypatch.setattr(pathlib.Path, "write_bytes", killed)
    child = os.fork()
    if not child:
        sentence("other words").save(path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.suffix for p in tmp_path.iterdir() if p != path] == [".partial"]
    assert write_report(tmp_path, tmp_path / "r.html").skipped == []


def test_concurrent_writes_of_one_file(tmp_path):
    path, errors = tmp_path / "e.safetensors", []

    def write(text):
        try:
            for _ in range(20):
                sentence(text).save(path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(f"a film, number {i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert Explanation.load(path).texts[0].startswith("a film, number ")
    assert [p.name for p in tmp_path.iterdir()] == ["e.safetensors"]


# -- pipes and devices ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.symlink_to("/dev/stdin")])
@pytest.mark.parametrize("name", ["x.txt", "x.png"])
def test_pipe_or_device_raises_before_it_is_opened(tmp_path, make, name):
    path = tmp_path / name
    make(path)
    with pytest.raises((LoadError, InputError), match="a pipe or a device"):
        read_argument(str(path))
