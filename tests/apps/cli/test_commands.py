"""The command line end to end, mostly in this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from show.builders import ATTACK
from waiting import HANG
from whyformer.apps import cli
from whyformer.notation import settings_in
from whyformer.options import WORDS

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "examples" / "pictures" / "digits_37.png"
SST2 = ROOT / "src" / "whyformer" / "bundled" / "sst2"
# The tests' torchvision does not fit torch, so child processes must not import it.
PROGRAM = "import sys; sys.argv[0] = 'whyformer'; sys.modules['torchvision'] = None; from whyformer.apps.cli import main; main()"
SENTENCE = "An utterly charming film, though it drags."


def whyformer(*arguments: str, stdin: str | bytes = "", cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a child process without a network."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default", **environment}
    raw = stdin.encode() if isinstance(stdin, str) else stdin
    completed = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], input=raw, capture_output=True, cwd=cwd, env=env, timeout=HANG, check=False)
    return subprocess.CompletedProcess(completed.args, completed.returncode, completed.stdout.decode(), completed.stderr.decode())


def error_of(*arguments: str, stdin: str | bytes | None = None) -> str:
    """The error message of the command: a single line, with exit status 2."""
    result = CliRunner().invoke(cli.app, list(arguments), input=stdin)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="session")
def tiny_vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random ViT of three classes with hostile names, and a processor, in a folder."""
    import transformers

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        id2label={0: "tabby, tabby cat", 1: ATTACK, 2: "Emu"}, label2id={"tabby, tabby cat": 0, ATTACK: 1, "Emu": 2},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 32}, "do_rescale": True,
                 "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "a photo.png"
    Image.effect_noise((60, 40), 80).convert("RGB").save(path)
    return path


# -- help --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("explain", "--help"), ("compare", "--help"), ("benchmark", "--help")])
def test_help_imports_no_torch(arguments):
    code = f"import sys; sys.argv = ['whyformer', {', '.join(map(repr, arguments))}]; from whyformer.apps.cli import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "whyformer" in completed.stdout


def test_help_has_examples_of_the_command():
    for command in ([], ["explain"], ["compare"], ["generate"], ["methods"]):
        result = CliRunner().invoke(cli.app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Examples" in result.stdout
        assert ("whyformer explain cat.jpg" in result.stdout) is (command in ([], ["explain"]))
        lines = result.stdout.split("Examples")[1].splitlines()
        examples = [line.strip() for line in lines if "whyformer" in line]
        assert len(examples) == sum(bool(line.strip()) for line in lines)  # none is broken at 80 columns
        assert all(" ".join(["whyformer", *command]) in line for line in examples)
        assert all(" -m " in line for line in examples if ".jpg" in line or ".png" in line)  # they have no default model


def test_help_shows_a_type_only_beside_options_that_take_a_value():
    for command in ([], ["explain"], ["attention"], ["app"], ["schema"]):
        lines = CliRunner().invoke(cli.app, [*command, "--help"]).stdout.splitlines()
        assert not any("bool" in line for line in lines)
    assert any("--top" in line and "<int" in line for line in CliRunner().invoke(cli.app, ["explain", "--help"]).stdout.splitlines())


@pytest.mark.parametrize("command", ["explain", "compare", "generate", "run", "maximize", "benchmark"])
def test_help_breaks_lines_at_the_width_of_the_terminal_alone(command):
    """A paragraph of the description is one line on a wide terminal; arguments have one pair of brackets."""
    shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "600"}).stdout
    usage, *lines = [line.strip() for line in shown.split("╭")[0].splitlines() if line.strip()]
    assert "[[" not in usage and "...}" not in usage
    assert all(line.endswith(".") for line in lines), lines


def test_package_runs_as_module():
    for arguments, status in (["--version"], 0), (["explain", "x", "--nonsense"], 2):
        completed = subprocess.run([sys.executable, "-m", "whyformer", *arguments], capture_output=True, text=True, timeout=HANG)
        assert completed.returncode == status
        assert "whyformer" in completed.stdout + completed.stderr


def test_version():
    import whyformer as package

    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"whyformer {package.__version__}\n"


def test_methods_lists_all_or_one():
    result = CliRunner().invoke(cli.app, ["methods"])
    assert "transformer_attribution" in result.stdout
    single = CliRunner().invoke(cli.app, ["methods", "transformer_attribution"])
    assert "start_layer = 0" in single.stdout


# -- invalid arguments -------------------------------------------------------------------------------------------
def test_missing_picture_is_not_taken_as_text():
    assert error_of("explain", "cat.png") == "error: no such file: cat.png"
    assert error_of("explain", "my holidays/CAT.JPEG") == "error: no such file: my holidays/CAT.JPEG"
    assert error_of("explain", "review.txt") == "error: no such file: review.txt"


def test_invalid_picture_is_refused(tmp_path):
    (tmp_path / "x.png").write_bytes(b"not a picture")
    assert "is not a picture" in error_of("explain", str(tmp_path / "x.png"))
    (tmp_path / "y.png").write_bytes(b"")
    assert "is empty" in error_of("explain", str(tmp_path / "y.png"))
    Image.new("RGB", (50, 50)).save(tmp_path / "z.png")
    (tmp_path / "z.png").write_bytes((tmp_path / "z.png").read_bytes()[:60])
    assert "damaged" in error_of("explain", str(tmp_path / "z.png"))
    (tmp_path / "d.png").mkdir()
    assert "is a folder" in error_of("explain", str(tmp_path / "d.png"))


def test_decompression_bomb_is_refused(tmp_path):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    assert "64 megapixels" in error_of("explain", str(tmp_path / "bomb.png"))
    Image.new("1", (9_000, 8_000)).save(tmp_path / "large.png")
    assert "9000 x 8000 pixels" in error_of("explain", str(tmp_path / "large.png"))


def test_other_files_and_folders_are_refused(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    assert "not a picture" in error_of("explain", str(tmp_path / "notes.md"))
    assert "is a folder" in error_of("explain", str(tmp_path))
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    assert "not UTF-8" in error_of("explain", str(tmp_path / "latin.txt"))


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_empty_text_is_refused(text):
    assert error_of("explain", text) == "error: the text is empty"
    assert error_of("explain", "-", stdin=text) == "error: the text is empty"


def test_standard_input_that_is_not_utf8_is_refused():
    assert error_of("explain", "-", stdin=b"\xff\xfe\x00") == "error: standard input is not UTF-8 text"


def test_unknown_method_error_lists_names():
    message = error_of("explain", SENTENCE, "--method", "nope")
    assert "transformer_attribution" in message
    assert "nope" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--setting", "nope=1"], "purpose='faithful'"),
        (["--setting", "start_layer=1"], "methods with this setting: transformer_attribution, "),
        (["--method", "transformer_attribution", "--setting", "nope=1"], "start_layer=0"),
        (["--setting", "start_layer"], "key=value"),
        (["--setting", "start_layer=-7"], "start_layer"),
        (["--format", "gif"], "png, svg, pdf, html, json"),
        (["--method", ","], "no method was named"),
        (["--model", "bundled:nope"], "bundled:digits"),
        (["--model", "./nowhere"], "no such folder"),
    ],
)
def test_invalid_option_is_refused(arguments, expected):
    assert expected in error_of("explain", SENTENCE, *arguments)


def test_options_are_checked_before_model_is_loaded(monkeypatch):
    import whyformer.models

    monkeypatch.setattr(whyformer.models, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    for arguments in (["--format", "gif"], ["--method", "nope"], ["--setting", "nope=1"]):
        error_of("explain", SENTENCE, *arguments)
        error_of("compare", SENTENCE, *arguments)


def test_error_escapes_terminal_control_characters():
    message = error_of("explain", "x\x1b[31m.png")
    assert "\x1b" not in message
    assert "\\x1b[31m" in message


def test_debug_raises_exception():
    result = CliRunner().invoke(cli.app, ["explain", "cat.png", "--debug"])
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "LoadError"


def test_internal_error_has_status_1(monkeypatch):
    def broken() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("whyformer.apps.cli.completion.names_file", broken)
    result = CliRunner().invoke(cli.app, ["methods"])
    assert result.exit_code == 1
    assert result.stderr == "error: whyformer failed (RuntimeError: boom); --debug shows where\n"


@pytest.mark.parametrize("command", ["explain", "compare", "attention", "perturb"])
def test_picture_without_model_is_refused(command):
    """The bundled model knows digits only; it would predict "4, 98.7 %" for a photograph."""
    message = error_of(command, str(ROOT / "examples" / "pictures" / "digits_37.png"))
    assert "no default model" in message
    assert "bundled:digits reads handwritten digits only" in message
    assert "--model" in message


# -- successful commands -----------------------------------------------------------------------------------------
def test_explain_sentence_end_to_end(tmp_path):
    out = tmp_path / "out"
    completed = whyformer("explain", SENTENCE, "-t", "positive", "-t", "0", "--out", str(out), "--format", "png,svg,pdf,html,json")
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    assert re.search(r"1 : positive +value = +-?\d+\.\d{3}  prob = +\d+\.\d%", completed.stdout)
    stem = "An_utterly_charming_film_though-libragrad-positive-negative"
    assert sorted(p.name for p in out.iterdir()) == [f"{stem}.{kind}" for kind in ("html", "json", "pdf", "png", "svg")]
    page = (out / f"{stem}.html").read_text()
    assert page.count("charming</span>") == 1  # the second class has opposite colours and is not drawn again
    assert "opposite for “negative”" in page
    assert "Why “negative”?" in completed.stdout
    data = json.loads((out / f"{stem}.json").read_text())
    assert [e["target"] for e in data["explanations"]] == [[1], [0]]


def test_text_from_standard_input_as_json(tmp_path):
    completed = whyformer("explain", "-", "--json", "--format", "none", stdin=SENTENCE, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    data = json.loads(completed.stdout)
    assert data["explanations"][0]["texts"] == [SENTENCE]
    assert data["files"] == []
    assert list(tmp_path.iterdir()) == []


def test_explain_text_file_quietly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "review.txt").write_text(f"\ufeff{SENTENCE}\n", encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["explain", "review.txt", "--quiet", "--out", "made"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert [p.suffix for p in (tmp_path / "made").iterdir()] == [".html"]


def test_hostile_text_on_ascii_terminal(tmp_path):
    completed = whyformer("explain", "-", "--format", "html,png", "--out", str(tmp_path), stdin=ATTACK + " 字 😀", PYTHONIOENCODING="ascii")
    assert completed.returncode == 0, completed.stderr
    assert "\x1b" not in completed.stdout
    names = [p.name for p in tmp_path.iterdir()]
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)
    page = next(tmp_path.glob("*.html")).read_text()
    assert "<script" not in page
    assert "\x1b" not in page


def test_compare_sentence(tmp_path):
    arguments = ["compare", SENTENCE, "--method", "transformer_attribution,gae,rollout", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".html", ".png"]
    page = next(tmp_path.glob("*.html")).read_text()
    assert page.count("charming</span>") == 3


def test_explain_picture_with_model_from_folder(photo, tiny_vit, tmp_path):
    out = tmp_path / "out"
    completed = CliRunner().invoke(cli.app, ["explain", str(photo), "--model", tiny_vit, "-t", "TABBY", "-t", "1", "--format", "png,html,json", "--out", str(out)])
    assert completed.exit_code == 0, completed.stderr
    assert "\x1b" not in completed.stdout
    assert "tabby, tabby cat" in completed.stdout
    names = sorted(p.name for p in out.iterdir())
    assert len(names) == 3
    assert all(re.fullmatch(r"a_photo-libragrad-tabby_tabby_cat-script_alert[\w.-]*", name) for name in names)
    with Image.open(next(out.glob("*.png"))) as picture:
        assert picture.width > picture.height
    assert "<script" not in next(out.glob("*.html")).read_text()


def test_settings_reach_the_method(photo, tiny_vit):
    result = CliRunner().invoke(cli.app, ["explain", str(photo), "--model", tiny_vit, "--method", "gae", "-s", "start_layer=1", "--json", "--format", "none"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["explanations"][0]["settings"]["start_layer"] == 1


@pytest.mark.parametrize(("text", "value"), [("none", "none"), ("None", None), ("null", None), ("TRUE", True), ('{"a": [1, 2]}', {"a": [1, 2]})])
def test_value_of_a_setting(text, value):
    assert settings_in([f"weighting={text}"]) == {"weighting": value}  # "none" is a value of some settings


def test_auto_chooses_method_for_purpose(photo, tiny_vit):
    for arguments, purpose, chosen in ([], "faithful", "libragrad"), (["--purpose", "localise"], "localise", "gae"):
        result = CliRunner().invoke(cli.app, ["explain", str(photo), "--model", tiny_vit, *arguments, "--json", "--format", "none"])
        assert result.exit_code == 0, result.output
        (explanation,) = json.loads(result.stdout)["explanations"]
        assert (explanation["method"], explanation["settings"]) == ("auto", {"purpose": purpose})
        assert explanation["diagnostics"]["auto"]["method"] == chosen
        output = CliRunner().invoke(cli.app, ["explain", str(photo), "--model", tiny_vit, *arguments, "--format", "none"]).stdout
        assert any(line.startswith(chosen) and "chosen automatically" in line for line in output.splitlines())
        assert ("less faithful to the model" in " ".join(output.split())) is (purpose == "localise")
    assert "leave one of them out" in error_of("explain", SENTENCE, "--purpose", "localise", "--method", "gae")
    assert "'faithful', 'localise'" in error_of("explain", SENTENCE, "--purpose", "pretty")


def test_auto_reports_methods_that_failed(monkeypatch):
    from whyformer.methods import METHODS

    def fails(task, **settings):
        raise RuntimeError("an odd shape")

    monkeypatch.setitem(METHODS, "libragrad", replace(METHODS["libragrad"], function=fails))
    output = " ".join(CliRunner().invoke(cli.app, ["explain", SENTENCE, "--format", "none"]).stdout.split())
    assert "lrp_ah_ln (secant=True) · chosen automatically" in output
    assert output.count("auto ran lrp_ah_ln") == 1
    assert output.count("an odd shape") == 1


def test_compare_picture_uses_two_likeliest_classes(photo, tiny_vit, tmp_path):
    result = CliRunner().invoke(cli.app, ["compare", str(photo), "--model", tiny_vit, "--json", "--out", str(tmp_path / "o")])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)["explanations"]
    assert len({e["target"][0] for e in data}) == 2
    assert len({e["method"] for e in data}) >= 2
    assert data[0]["method"] == "auto"


def test_model_is_loaded_once(photo, tiny_vit, monkeypatch):
    import whyformer.models

    loaded, original = [], whyformer.models.load

    def counted(*arguments, **options):
        loaded.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(whyformer.models, "load", counted)
    result = CliRunner().invoke(cli.app, ["explain", str(photo), "--model", tiny_vit, "--method", "gae,rollout", "-t", "0", "-t", "2", "--quiet", "--format", "none"])
    assert result.exit_code == 0, result.output
    assert len(loaded) == 1


@pytest.mark.parametrize("arguments", [["-t", "aardvark"], ["-t", "99"], ["-t", "0", "-t", "99"]])
def test_unknown_class_writes_nothing(photo, tiny_vit, tmp_path, arguments):
    message = error_of("explain", str(photo), "--model", tiny_vit, *arguments, "--out", str(tmp_path / "out"))
    assert "aardvark" in message or "99" in message
    assert not (tmp_path / "out").exists()


def test_picture_for_text_model_is_refused(photo):
    assert "reads text, and this is a picture" in error_of("explain", str(photo), "--model", "bundled:sst2")


def test_long_text_error_names_limit_and_truncate_option(tmp_path):
    long = "film " * 3000
    message = error_of("explain", "-", "--out", str(tmp_path / "o"), stdin=long)
    assert re.search(r"at most \d+", message)
    assert "--truncate" in message
    assert not (tmp_path / "o").exists()
    result = CliRunner().invoke(cli.app, ["explain", "-", "--truncate", "--quiet", "--format", "none"], input=long)
    assert result.exit_code == 0, result.output


def test_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write to" in error_of("explain", SENTENCE, "--out", str(tmp_path / "file" / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_failed_write_leaves_no_file(tmp_path, monkeypatch):
    from whyformer.errors import LoadError
    from whyformer.show import files

    original = Path.write_bytes

    def full(self, data):
        if self.name.startswith(".b"):
            raise OSError(28, "No space left on device")
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(LoadError, match="No space left"):
        files.write_all(tmp_path / "new" / "deep", {"a.png": b"1", "b.png": b"2"})
    assert list(tmp_path.iterdir()) == []


def test_dtype_reaches_the_model(photo, tiny_vit):
    result = CliRunner().invoke(cli.app, ["explain", str(photo), "--model", tiny_vit, "--dtype", "float64", "--quiet", "--format", "none"])
    assert result.exit_code == 0, result.output
    assert "dtype" in error_of("explain", str(photo), "--model", tiny_vit, "--dtype", "float8")


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", SENTENCE], ["compare", SENTENCE], ["attention", SENTENCE], ["perturb", str(DIGITS), "--model", "bundled:digits"],
        ["generate", SENTENCE, "--model", "bundled:reader"], ["audit", "bundled:sst2"], ["serve", "bundled:sst2"],
        ["run", "--input", str(DIGITS), "--model", "bundled:digits", "--out", "nowhere"],
    ],
)  # fmt: skip
def test_commands_that_run_a_model_have_all_model_options(arguments):
    command = typer.main.get_command(cli.app).commands[arguments[0]]
    assert set(WORDS) <= {parameter.name for parameter in command.params}
    assert "dtype must be one of" in error_of(*arguments, "--dtype", "float8")


def test_missing_cuda_is_refused(photo, tiny_vit):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert "cuda" in error_of("explain", str(photo), "--model", tiny_vit, "--device", "cuda")


def test_explain_bundled_digits_end_to_end(tmp_path):
    picture = ROOT / "examples" / "pictures" / "digits_37.png"
    completed = CliRunner().invoke(cli.app, ["explain", str(picture), "-m", "bundled:digits", "-t", "3", "-t", "7", "--out", str(tmp_path), "--format", "png,html"])
    assert completed.exit_code == 0, completed.stderr
    assert completed.stderr == ""
    assert {p.suffix for p in tmp_path.iterdir()} == {".png", ".html"}
    assert "prob = " in completed.stdout


def test_explain_deit_from_folder(shared, tmp_path):
    picture = shared / "data" / "two_objects" / "el3.png"
    weights = shared / "weights" / "deit_tiny_in1k"
    completed = CliRunner().invoke(cli.app, ["explain", str(picture), "-m", str(weights), "-t", "African elephant", "-t", "zebra", "--out", str(tmp_path), "--json"])
    assert completed.exit_code == 0, completed.stderr
    elephant, zebra = (torch.tensor(e["scores"][0]) for e in json.loads(completed.stdout)["explanations"])
    assert abs(float(torch.corrcoef(torch.stack([elephant, zebra]))[0, 1])) < 0.3
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_masked_language_model_with_token_target(tmp_path: Path) -> None:
    """A masked language model by name, with a token at a position as target."""
    import shutil

    import transformers

    folder = tmp_path / "masked"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    tokenizer = transformers.AutoTokenizer.from_pretrained(SST2)
    torch.manual_seed(0)
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SST2 / name, folder / name)
    arguments = ("explain", SENTENCE, "--model", str(folder), "--out", str(tmp_path / "out"), "--format", "none", "--json")
    word = tokenizer.convert_ids_to_tokens(tokenizer.encode("film", add_special_tokens=False))
    assert word == ["film"]
    result = CliRunner().invoke(cli.app, [*arguments, "--target", "Token(5, 'film')"])
    assert result.exit_code == 0, result.output
    (explanation,) = json.loads(result.stdout)["explanations"]
    assert explanation["target_names"] == ["'film' at position 5"]
    assert "targets.Token(" in error_of(*arguments)
    assert "outside sample 0" in error_of(*arguments, "--target", "Token(99, 'film')")
