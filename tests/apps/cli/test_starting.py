"""The command starts and ends quickly, and nothing is lost or changed by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
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
print(*("torch._dynamo.eval_frame" in sys.modules, "scipy" in sys.modules, "torch.distributed.tensor" in sys.modules, "sympy" in sys.modules))
"""


def test_scores_are_the_same_to_the_bit(tmp_path: Path) -> None:
    scores, there = python(EXPLAINS, tmp_path).splitlines()
    assert scores == python(EXPLAINS.replace("import_lightly()", ""), tmp_path).splitlines()[0]
    assert there == "False False False False"


SHAPES = """
import_lightly()
import torch
from torch.fx.experimental import symbolic_shapes as shapes
stood = sys.modules[shapes.__name__]
x = torch.ones(2, 3, requires_grad=True)
for wrong in (torch.ones(3, 2), torch.ones(2, 3, 1), torch.ones(2)):
    try:
        torch.autograd.grad(x * 2, x, wrong)
    except RuntimeError as error:
        assert "Mismatch in shape" in str(error)
    else:
        raise AssertionError(wrong.shape)
assert torch.autograd.grad(x * 2, x, torch.ones(2, 3))[0].tolist() == [[2.0] * 3] * 2
drawn = torch.empty(2, 3, device="meta", dtype=torch.float64)
assert drawn.normal_(1.0, std=2.0) is drawn and torch.randn(4, 5, device="meta").shape == (4, 5)
assert torch.nn.Embedding(7, 3, device="meta").weight.shape == (7, 3)
assert torch.empty_like(drawn, device="cpu").shape == (2, 3) and "sympy" not in sys.modules
assert shapes.guard_or_false(False) is False and shapes.guard_or_true(True) is True and not shapes.is_nested_int(3)
assert shapes.sym_eq((2, (3, 4)), (2, (3, 4))) and not shapes.sym_eq((2,), (2, 1)) and "sympy" not in sys.modules

# sizes that are not known yet need the whole; what was taken before goes on
from torch.fx.experimental.symbolic_shapes import expect_true, guard_or_false, sym_eq
class Doubled(torch.nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0] * 2, -1)
program = torch.export.export(Doubled(), (torch.ones(4, 6),), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}})
assert program.module()(torch.ones(8, 6)).shape == (16, 3)
assert sys.modules[shapes.__name__] is stood is shapes and "sympy" in sys.modules and isinstance(shapes.ShapeEnv, type)
assert expect_true(True) and not guard_or_false(False) and sym_eq((2, 3), (2, 3)) and not sym_eq((2, 3), (2,))
print("whole")
"""


@pytest.mark.slow
def test_sizes_are_compared_without_sympy_until_one_is_unknown(tmp_path: Path) -> None:
    assert python(SHAPES, tmp_path) == "whole\n"


DRAWN = """
def command():
    import hashlib, pathlib
    from whyformer.apps.cli import app
    app(sys.argv[1:], standalone_mode=False)
    print(*sorted((f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in pathlib.Path("results").rglob("*.png")))
    import matplotlib.axes, torch._prims
    print(bool(matplotlib.axes.Axes.set.__doc__ and "alpha" in matplotlib.axes.Axes.set.__doc__), "sympy" in sys.modules)
sys.argv = ["whyformer", "explain", PICTURE, "--model", "bundled:digits", "--quiet", "--out", "results"]
OWN
"""


@pytest.mark.slow
def test_a_picture_is_drawn_the_same_byte_for_byte(tmp_path: Path) -> None:
    code = DRAWN.replace("PICTURE", repr(str(Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png")))
    light = python(code.replace("OWN", "own_process(command)"), tmp_path).splitlines()
    ordinary = python(code.replace("OWN", "command()"), tmp_path).splitlines()
    assert light[-2] == ordinary[-2]
    assert ".png" in light[-2]
    assert (light[-1], ordinary[-1]) == ("False False", "True True")


def test_operations_are_registered_with_the_same_place() -> None:
    from torch._library.utils import get_source

    assert [starting._place(2), starting._place(1)] == [get_source(2), get_source(1)]


ANSWERS = """
def command():
    from whyformer.apps.cli import app
    app(sys.argv[1:], standalone_mode=False)
    print("sympy" in sys.modules)
sys.argv = ["whyformer", "explain", "Once upon a time", "--model", MODEL, "--generate", "2", "--out", "results"]
OWN
"""


def test_language_models_answer_alike(tmp_path: Path) -> None:
    """Their masks and positions ask torch for more than classifiers do."""
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=None
    )
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "Once": 1, "upon": 2, "a": 3, "time": 4}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    code = ANSWERS.replace("MODEL", repr(str(tmp_path / "model")))
    light = python(code.replace("OWN", "own_process(command)"), tmp_path)
    ordinary = python(code.replace("OWN", "command()"), tmp_path)
    assert light.splitlines()[:-1] == ordinary.splitlines()[:-1]
    assert len(light.splitlines()) > 3


LATER = """
import_lightly()
import torch, transformers
from transformers.utils import import_utils
assert transformers.utils.is_scipy_available() and import_utils.is_scipy_available()
assert transformers.utils.is_torch_distributed_available() == torch.distributed.is_available()

# a model whose own file needs scipy has it
from transformers.models.mask2former import modeling_mask2former
assert modeling_mask2former.linear_sum_assignment([[1.0, 0.0], [0.0, 1.0]])[1].tolist() == [1, 0]

# its lists of names and files are what they are
print(*sorted(dir(transformers)), sorted((sorted(k), sorted((n, sorted(v)) for n, v in names.items())) for k, names in import_utils.define_import_structure(transformers.models.__file__).items()))

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


FAILS_HALFWAY = """
import torch, transformers.utils, importlib, whyformer.apps.cli.starting as starting
original = importlib.import_module
def fails(name, *rest):
    if name == "transformers.modeling_utils":
        raise ImportError("built differently")
    return original(name, *rest)
importlib.import_module = fails
import_lightly()
importlib.import_module = original
assert "torch._dynamo" not in sys.modules and "torch.fx.experimental.symbolic_shapes" not in sys.modules
import whyformer
print(whyformer.explain("bundled:sst2", "A charming film, though it drags.", "rollout").scores.shape[1])
import torch._dynamo, torch.fx.experimental.symbolic_shapes as shapes
assert torch._dynamo.eval_frame and shapes.ShapeEnv and torch.fx.experimental.symbolic_shapes is shapes
"""


@pytest.mark.parametrize("code", [OTHERWISE_BUILT, FAILS_HALFWAY])
def test_another_build_is_imported_as_always(code: str, tmp_path: Path) -> None:
    assert python(code, tmp_path) == "10\n"


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
        sooner.hasten(vars(import_utils))
        found = [import_utils.fetch__all__(text) for text in texts + odd]
    assert import_utils.fetch__all__ is fetch
    assert found == [fetch(text) for text in texts + odd]
    assert sum(map(bool, found)) > 300
