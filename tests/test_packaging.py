"""Structure of the package: import layers, sizes of files, public names, and files of the distribution."""

import ast
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import whyformer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "whyformer"
FILES = sorted(SOURCE.rglob("*.py"))

# Modules and packages directly below whyformer ("layers") -> the layers that they may import besides themselves. The
# table is complete: a layer or an import that is not in it fails.
RESULTS = {"errors", "explanation"}
ALLOWED_IMPORTS = {
    "__init__": {"errors"},
    "errors": set(),
    "baselines": RESULTS,
    "defaults": set(),
    "notation": {"errors"},
    "progress": {"errors"},
    "explanation": {"errors", "show", "__version__"},  # show: an Explanation displays itself
    "targets": {"errors", "models"},
    "show": RESULTS | {"defaults"},
    "datasets": {"errors", "inputs"},
    "evaluate": set(),
    "models": {"errors", "tape"},
    "tape": {"errors"},
    "rules": {"errors", "tape"},
    "inputs": RESULTS | {"baselines", "models"},
    "methods": RESULTS | {"baselines", "defaults", "inputs", "models", "options", "rules", "tape", "targets"},
    "batches": RESULTS | {"inputs", "models", "progress", "targets"},
    "options": {"errors"},
    "prepared": RESULTS | {"methods", "models", "inputs", "progress", "targets"},
    "explaining": {"explanation", "batches", "defaults", "methods", "models", "inputs", "options", "prepared", "progress", "targets"},
    "explainer": {"explanation", "attention", "comparing", "defaults", "explaining", "generation", "progress", "targets"},
    "generation": RESULTS | {"defaults", "explaining", "inputs", "methods", "models", "options", "prepared", "progress", "targets"},
    "inside": {"errors", "show", "tape"},
    "recording": {"errors", "explaining", "inside", "methods", "models", "options", "prepared", "rules", "tape", "targets"},
    "comparing": RESULTS | {"show", "defaults", "explaining", "inputs", "methods", "options", "prepared", "progress", "targets"},
    "attention": RESULTS | {"explaining", "methods", "options", "prepared", "tape", "targets"},
    "auditing": {"errors", "explaining", "explanation", "methods", "models", "options", "prepared", "progress", "rules", "show", "tape", "targets"},
    "maximize": RESULTS | {"models", "inputs", "progress", "tape", "targets"},
    "evaluation": RESULTS | {"baselines", "comparing", "explaining", "inputs", "methods", "models", "options", "prepared", "targets"},
    "jobs": RESULTS | {"comparing", "datasets", "defaults", "evaluation", "explaining", "inputs", "methods", "models", "options", "prepared", "progress", "show", "targets"},
    "benchmarks": RESULTS | {"baselines", "datasets", "evaluation", "explaining", "inputs", "jobs", "methods", "models", "notation", "prepared", "progress", "tape", "targets"},
    "apps": {"errors"},
    "apps.http": {"errors"},
    "apps.report": RESULTS | {"show", "methods", "inputs", "jobs", "progress"},
    "apps.web": RESULTS | {"", "apps", "apps.http", "comparing", "defaults", "evaluation", "explainer", "inputs", "methods", "models", "options", "prepared", "progress", "show", "targets"},
    "apps.server": RESULTS | {"", "apps", "apps.http", "defaults", "explainer", "inputs", "jobs", "methods", "models", "options", "show"},
    "apps.cli": RESULTS
    | {"", "__version__", "apps", "apps.report", "apps.server", "apps.web", "auditing", "baselines", "benchmarks", "comparing", "defaults", "evaluation", "explainer", "inputs", "jobs", "maximize", "methods", "models", "notation", "options", "show", "targets"},
    "web": {"apps.web"},
    "report": {"apps.report"},
    "__main__": {"apps.cli"},
}


def layer_of(parts):
    """The first part of a dotted name below the package; each app is a layer."""
    return ".".join(parts[:2] if parts[:1] == ["apps"] else parts[:1])


def imported(path):
    """(layer, top package) of each import of a file, without imports under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"whyformer.{a.name}" for a in node.names] if node.module == "whyformer" else [node.module or ""]
        for name in names:
            top, *rest = name.split(".")
            yield (layer_of(rest) if top == "whyformer" else None), top


def imported_files(path, names):
    """Modules of the package that a file imports; a name that is no module counts for its package."""
    tree = ast.parse(path.read_text())
    typing_only = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whyformer.") and id(node) not in typing_only:
            yield from (f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in names else node.module for a in node.names)


@pytest.fixture(scope="module")
def layer_imports():
    """file -> (its layer, the other layers that it imports)."""
    imports = {}
    for path in FILES:
        layer = layer_of([part.removesuffix(".py") for part in path.relative_to(SOURCE).parts if path.parent == SOURCE or part != "__init__.py"])
        imports[str(path.relative_to(SOURCE))] = layer, {to for to, _ in imported(path) if to is not None} - {layer}
    return imports


def test_imports_are_allowed_by_the_table(layer_imports):
    assert {name: to - ALLOWED_IMPORTS[layer] for name, (layer, to) in layer_imports.items() if not to <= ALLOWED_IMPORTS[layer]} == {}


def test_allowed_imports_are_used(layer_imports):
    matches = {name: set() for name in ALLOWED_IMPORTS}
    for layer, to in layer_imports.values():
        matches[layer] |= to
    assert matches == ALLOWED_IMPORTS


def test_modules_have_no_import_cycles():
    """Imports inside functions count too, except those of show in Explanation."""
    names = {".".join(part for part in path.relative_to(SOURCE.parent).with_suffix("").parts if part != "__init__"): path for path in FILES}
    imports = {name: {to for to in imported_files(path, names) if not (name == "whyformer.explanation.result" and to.startswith("whyformer.show"))} for name, path in names.items()}
    while leaves := {name for name, to in imports.items() if not to & imports.keys() - {name}}:
        imports = {name: to for name, to in imports.items() if name not in leaves}
    assert sorted(imports) == [], "these files import one another, or import such files"


def test_layers_of_the_table_exist():
    paths = [SOURCE / name.replace(".", "/") for name in ALLOWED_IMPORTS]
    assert [path for path in paths if not path.is_dir() and not path.with_suffix(".py").is_file()] == []


@pytest.mark.parametrize("path", sorted((SOURCE / "show").rglob("*.py")), ids=lambda p: p.name)
def test_show_does_not_import_torch(path):
    assert not {"torch", "transformers"} & {top for _, top in imported(path)}


def test_source_files_have_at_most_500_lines():
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_public_names_are_sorted_and_importable():
    assert whyformer.__all__ == sorted(whyformer.__all__)
    assert len(whyformer.__all__) < 25
    for name in whyformer.__all__:
        assert getattr(whyformer, name) is not None


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(SOURCE)))
def test_exported_names_are_unique(path):
    # their order is ruff's to check (RUF022: constants first)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
            assert len(names) == len(set(names))


def test_modules_have_the_plain_module_type():
    import whyformer.evaluation.metrics
    import whyformer.methods

    assert [name for name, module in sys.modules.items() if name.split(".")[0] == "whyformer" and type(module) is not types.ModuleType] == []
    assert isinstance(whyformer.evaluate, types.FunctionType)


def test_no_file_is_named_util_or_helper():
    assert not [p for p in FILES if re.search(r"util|helper|common|misc", p.stem)]


def test_names_of_test_files_are_unique():
    # pytest imports test files by their base name
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def tracked():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".sh", ".cfg", ".yml", ""} and path.is_file() and path.name != "LICENSE":
            yield name, path.read_bytes().decode("utf-8", "replace")


def test_files_have_no_machine_path_or_registry_address():
    # written in parts, so that this file does not match
    pattern = re.compile("(?<![\\w.])/(?:" + "work|root|tmp|home)/" + "|py" + r"pi\.org|files\.python" + "hosted|download\\.py" + "torch|extra-" + "index")
    matches = [(name, m.group()) for name, text in tracked() for m in pattern.finditer(text)]
    assert matches == []


def test_bundled_models_are_in_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/whyformer"]
    ignored = subprocess.run(["git", "check-ignore", "src/whyformer/bundled/digits/model.safetensors"], cwd=ROOT, capture_output=True, check=False)
    assert ignored.stdout == b""
    for folder in (SOURCE / "bundled").iterdir():
        if folder.is_dir() and not folder.name.startswith("__"):
            assert sum(p.stat().st_size for p in folder.rglob("*")) < 10_000_000


def test_typeface_and_its_licence_are_in_the_distribution():
    fonts = SOURCE / "show" / "fonts"
    ignored = subprocess.run(["git", "check-ignore", *fonts.iterdir()], cwd=ROOT, capture_output=True, check=False)
    assert ignored.stdout == b""
    assert sum(p.stat().st_size for p in fonts.iterdir()) < 600_000
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "SIL OPEN FONT LICENSE" in (ROOT / next(name for name in project["license-files"] if "OFL" in name)).read_text()


def test_dependencies_are_pinned_in_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    required = {re.split(r"[><=\[]", dependency)[0] for group in groups for dependency in group}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert required - {"whyformer"} <= pinned


@pytest.mark.parametrize("name", ["scripts/demo", "scripts/pictures", "scripts/test", ".ci/run"])
def test_scripts_are_executable(name):
    path = ROOT / name
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_licence_text_is_complete():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert len(text) > 10_000
