"""``--json``: one object per command that conforms to the shipped schema; ``--quiet``; exit status; progress bars."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from waiting import HANG
from whyformer.apps import cli
from whyformer.apps.cli.printing import Bars
from whyformer.apps.cli.schema import COMMANDS, make_schema

ROOT = Path(__file__).parents[3]
PICTURE = str(ROOT / "examples" / "pictures" / "digits_37.png")
PROGRAM = "import sys; sys.argv[0] = 'whyformer'; sys.modules['torchvision'] = None; from whyformer.apps.cli import main; main()"


def run_json(*arguments: str, status: int = 0) -> dict:
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def schema_of(command: str) -> dict:
    result = CliRunner().invoke(cli.app, ["schema", command])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_documented(value: object, schema: dict, whole: dict, path: str = "$") -> None:
    """Check that every printed key is documented in the schema."""
    schema = next((option for option in schema.get("anyOf", [schema]) if option != {"type": "null"}), schema)
    schema = whole["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, dict) and "properties" in schema:
        assert set(value) <= set(schema["properties"]), f"{path}: {set(value) - set(schema['properties'])} not in the schema"
        for key, inner in value.items():
            assert_documented(inner, schema["properties"][key], whole, f"{path}.{key}")
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for key, inner in value.items():
            assert_documented(inner, schema["additionalProperties"], whole, f"{path}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for i, inner in enumerate(value):
            assert_documented(inner, schema["items"], whole, f"{path}[{i}]")


def assert_conforms(command: str, output: dict) -> None:
    schema = schema_of(command)
    jsonschema.validate(output, schema)
    assert_documented(output, schema, schema)
    assert output["command"] == command
    jsonschema.validate(output, make_schema())


def test_schema_is_valid_and_covers_every_command():
    jsonschema.Draft202012Validator.check_schema(make_schema())
    takes_json = {name for name, command in cli_commands().items() if any("--json" in p.opts for p in command.params)}
    assert takes_json == set(COMMANDS) & set(cli_commands())
    assert set(cli_commands()) == takes_json | {"schema"}


def cli_commands() -> dict:
    import typer

    return typer.main.get_command(cli.app).commands


def test_every_command_has_quiet_and_debug():
    for name, command in cli_commands().items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--debug" in options, name
        assert "--quiet" in options or name == "schema"


def test_schema_rejects_invalid_output():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": 1, "command": "methods", "methods": [{"name": 3}]}, schema_of("methods"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"command": "methods", "methods": []}, schema_of("methods"))


def test_schema_of_unknown_command_is_refused():
    result = CliRunner().invoke(cli.app, ["schema", "nope"])
    assert result.exit_code == 2
    assert "explain" in result.stderr


def test_json_of_checks():
    arguments = ["explain", "An utterly charming film, though it drags.", "-t", "1", "-t", "0", "--check", "--format", "none"]
    facts = run_json(*arguments)
    assert_conforms("explain", facts)
    assert [c["followed"] for c in facts["checks"]] == [[1], [0]]
    for e, check in zip(facts["explanations"], facts["checks"], strict=True):
        assert check["method"] == e["method"]
        assert len(check["curves"][0]) == len(check["fractions"]) == len(check["random"][0][0])
        assert check["curves"][0][0] == pytest.approx(e["probabilities"][0][e["target"][0]], abs=1e-6)
    shown = CliRunner().invoke(cli.app, arguments).stdout
    assert all(check["verdicts"][0] in " ".join(shown.split()) for check in facts["checks"])


def test_json_of_audit():
    output = run_json("audit", "bundled:sst2")
    assert_conforms("audit", output)
    assert output["methods"]["rollout"] is None
    assert output["streams"][0]["name"] == "input_ids"


def test_json_of_methods():
    assert_conforms("methods", run_json("methods"))
    assert [m["name"] for m in run_json("methods", "gae")["methods"]] == ["gae"]


@pytest.mark.parametrize("source", ["An utterly charming film, though it drags.", PICTURE], ids=["text", "picture"])
@pytest.mark.parametrize("command", ["explain", "compare"])
def test_json_of_explanations(command, source, tmp_path):
    methods = "transformer_attribution" if command == "explain" else "rollout,input_x_gradient"
    model = "bundled:digits" if source == PICTURE else "bundled:sst2"
    output = run_json(command, source, "--model", model, "--method", methods, "--format", "json", "--out", str(tmp_path))
    assert_conforms(command, output)
    assert output["versions"]["whyformer"]
    assert {e["model"] for e in output["explanations"]} == {output["model"]}
    (path,) = output["files"]
    written = json.loads(Path(path).read_text())
    assert_conforms(command, written)
    assert written["explanations"] == output["explanations"]
    assert ("picture" in written) == (source == PICTURE)


def test_json_of_maximize(tmp_path):
    output = run_json("maximize", "3", "--steps", "2", "--out", str(tmp_path / "3.png"))
    assert_conforms("maximize", output)
    assert [len(unit["history"]) for unit in output["units"]] == [3]


def test_json_of_benchmark(tmp_path):
    output = run_json("benchmark", "segmentation", "--model", "bundled:digits", "--data", "scenes:2", "--methods", "rollout", "--out", str(tmp_path))
    assert_conforms("benchmark", output)
    assert output["figures"]
    assert {t["table"] for t in output["tables"]} == {f["table"] for f in output["figures"]}
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["figures"] == output["figures"]


def test_json_of_app(monkeypatch):
    """The address of the started page. The page itself is tested in tests/apps/browser."""
    monkeypatch.setattr("whyformer.apps.web.serve", lambda catalogue, *, started, **options: started("http://127.0.0.1:7860"))
    output = run_json("app")
    assert_conforms("app", output)
    assert output["url"] == "http://127.0.0.1:7860"


def test_quiet_prints_nothing(tmp_path):
    for arguments in (["methods"], ["maximize", "3", "--steps", "2", "--out", str(tmp_path / "3.png")]):
        result = CliRunner().invoke(cli.app, [*arguments, "--quiet"])
        assert (result.exit_code, result.output) == (0, "")


def test_interrupt_has_status_130(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("whyformer.apps.cli.completion.names_file", interrupted)
    result = CliRunner().invoke(cli.app, ["methods"])
    assert (result.exit_code, result.output) == (130, "interrupted\n")


def test_closed_standard_output_raises_no_error():
    code = PROGRAM.replace("main()", "sys.argv[1:] = ['methods', '--json']; main()")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"rror" not in process.stderr.read()
    process.stderr.close()
    process.wait(HANG)


def run_in_terminal(program, *arguments):
    """Run a Python program; return its standard output, and its standard error as a terminal received it."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    received = b""
    while process.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.2)[0]:
            try:
                received += os.read(master, 65536)
            except OSError:
                break
    os.close(master)
    assert process.stdout is not None
    output = process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    return output, received


def test_progress_is_printed_only_to_terminal():
    """Progress goes to standard error if it is a terminal; standard output is valid JSON."""
    output, received = run_in_terminal(PROGRAM, "explain", "A charming film.", "--method", "occlusion", "--json", "--format", "none")
    assert json.loads(output)["explanations"][0]["method"] == "occlusion"
    assert b"loading bundled:sst2" in received
    assert b"occlusion" in received


def test_progress_bar_shows_rate_and_time_left():
    program = (
        "import time\nfrom whyformer.apps.cli.printing import Printer\n"
        "with Printer().working() as bars:\n    for _ in bars.track(range(30), 'rows', 30):\n        time.sleep(0.05)\n"
    )
    _, received = run_in_terminal(program)
    assert re.search(rb"\d(\.\d+)?/s", received) and b"left" in received


def test_progress_bar_shows_end_of_generated_text():
    bars = Progress(disable=True)
    track = Bars(bars).track(("Once", "Once upon\n a \x1b[2Jtime" + " and" * 20), "writing", 2)
    descriptions = [bars.tasks[0].description for _ in track]
    assert descriptions[0] == "writing: … Once"
    assert descriptions[1] == "writing: … " + ("x" + " and" * 20)[-40:]
