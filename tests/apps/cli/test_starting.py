"""The command starts and ends quickly, and nothing is lost or changed by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from whyformer.apps.cli import starting

LIGHTLY = "import sys; sys.modules['torchvision'] = None\nfrom whyformer.apps.cli.starting import import_lightly, own_process\n"


def python(code: str, cwd: Path, status: int = 0) -> str:
    made = subprocess.run([sys.executable, "-c", LIGHTLY + code], cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert made.returncode == status, made.stderr
    return made.stdout


EXPLAINS = """
import_lightly()
import whyformer
print(whyformer.explain("bundled:sst2", "A charming film, though it drags.", "transformer_attribution").scores.numpy().tobytes().hex())
print(*("torch._dynamo.eval_frame" in sys.modules, "scipy" in sys.modules, "torch.distributed.tensor" in sys.modules))
"""


def test_scores_are_the_same_to_the_bit(tmp_path: Path) -> None:
    scores, there = python(EXPLAINS, tmp_path).splitlines()
    assert scores == python(EXPLAINS.replace("import_lightly()", ""), tmp_path).splitlines()[0]
    assert there == "False False False"


LATER = """
import_lightly()
import torch, transformers
from transformers.utils import import_utils
assert transformers.utils.is_scipy_available() and import_utils.is_scipy_available()
assert transformers.utils.is_torch_distributed_available() == torch.distributed.is_available()

# a model whose own file needs scipy has it
from transformers.models.mask2former import modeling_mask2former
assert modeling_mask2former.linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])[1].tolist() == [1, 0]

# detection: the forward pass, bit by bit what it is after an ordinary import
torch.manual_seed(0)
size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=[32, 32], patch_size=8)
model = transformers.YolosForObjectDetection(transformers.YolosConfig(**size, num_detection_tokens=8)).eval()
print(model(torch.ones(1, 3, 32, 32)).logits.detach().numpy().tobytes().hex())
"""


@pytest.mark.slow
def test_afterwards_all_that_is_installed_is_there(tmp_path: Path) -> None:
    light, ordinary = python(LATER, tmp_path), python(LATER.replace("import_lightly()\n", ""), tmp_path)
    assert light == ordinary
    assert len(light) > 100


COMPILES = """
import_lightly()
import torch
stood = sys.modules["torch._dynamo"]

@torch.compiler.disable
def marked(x):
    return x + 1

@torch.compiler.allow_in_graph
def allowed(x):
    return x * 2

seen = []
def backend(graph, inputs):
    seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return graph.forward

assert marked(torch.ones(1)).item() == 2 and "torch._dynamo.eval_frame" not in sys.modules
out = torch.compile(lambda x: marked(allowed(x)) * 3, backend=backend)(torch.ones(1))
assert out.item() == 9 and sys.modules["torch._dynamo"] is stood is torch._dynamo
print("allowed" in str(seen), "add" in str(seen))
"""


@pytest.mark.slow
def test_the_compiler_is_there_when_it_is_needed(tmp_path: Path) -> None:
    assert python(COMPILES, tmp_path) == "True False\n"  # what was marked before it came is not compiled


OTHERWISE_BUILT = """
import transformers.utils, whyformer.apps.cli.starting as starting
def fails(name):
    raise ImportError("built differently")
starting.find_spec = fails
import_lightly()
assert "transformers.masking_utils" not in sys.modules
import whyformer
print(whyformer.explain("bundled:sst2", "A charming film, though it drags.", "rollout").scores.shape[1])
"""


def test_another_build_is_imported_as_always(tmp_path: Path) -> None:
    assert python(OTHERWISE_BUILT, tmp_path) == "10\n"


ENDS = """
import atexit, gc
def command():
    from whyformer.apps.cli import app
    atexit.register(lambda: print("handled"))
    try:
        app(sys.argv[1:])
    finally:
        print("collecting", gc.isenabled())
sys.argv = ["whyformer", *WORDS]
own_process(command)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [(["explain", "A film.", "--method", "saliency", "--quiet"], 0), (["explain", "A film.", "--model", "bundled:digits"], 2), (["schema"], 0)],
)  # fmt: skip
def test_the_end_is_an_ordinary_one_to_all_who_look(words: list[str], status: int, tmp_path: Path) -> None:
    said = python(ENDS.replace("WORDS", repr(words)), tmp_path, status)
    assert said.endswith("collecting True\nhandled\n")
    assert len(list(tmp_path.rglob("*.html"))) == (words[0] == "explain" and status == 0)


def test_the_names_of_a_file_are_those_that_transformers_finds():
    from transformers.utils import import_utils

    fetch = import_utils.fetch__all__
    files = sorted((Path(transformers.__file__).parent / "models").rglob("modeling_*.py"))
    texts = [f.read_text(encoding="utf-8") for f in files]
    odd = ["", "a = 1\n", "x = '__all__'\n", "__all__ = ['a']", "\n__all__ = [\n  'a',\n]\n", "__all__ = ['a']\n__all__ = ['b']\n"]
    sooner = starting._Sooner()
    with sooner:
        sooner.quicken(vars(import_utils))
        found = [import_utils.fetch__all__(text) for text in texts + odd]
    assert import_utils.fetch__all__ is fetch
    assert found == [fetch(text) for text in texts + odd]
    assert sum(map(bool, found)) > 300
