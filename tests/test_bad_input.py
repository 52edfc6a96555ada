"""Invalid inputs, targets, methods and models raise errors that name the cause and the remedy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import whyformer
from whyformer import show
from whyformer.errors import InputError, LoadError, ModelError, WhyformerError
from whyformer.evaluation.deletion import token_deletion
from whyformer.methods.registry import METHODS, method
from whyformer.methods.task import Scores, Task
from whyformer.models.loading import Loaded, load
from whyformer.targets.naming import class_index
from zoo import build

explain = whyformer.explain


def without_origin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model without its path, so that no processor can be loaded with it."""
    import copy

    copied = copy.deepcopy(model)
    copied.config._name_or_path = ""
    return copied


@cache
def sst2() -> Loaded:
    return load("bundled:sst2")


@cache
def digits() -> Loaded:
    return load("bundled:digits")


def text(sentence: Any, **options: Any) -> whyformer.Explanation:
    return explain(sst2().model, sentence, processor=sst2().processor, **options)


def picture(image: Any, **options: Any) -> whyformer.Explanation:
    return explain(digits().model, image, processor=digits().processor, **options)


def refused(kind: type[WhyformerError], *parts: str) -> Any:
    """Expect an error of this class whose one-line message contains all parts."""

    class Check:
        def __enter__(self) -> None:
            self.context = pytest.raises(kind)
            self.caught = self.context.__enter__()

        def __exit__(self, *details: Any) -> Any:
            swallowed = self.context.__exit__(*details)
            message = str(self.caught.value)
            for part in parts:
                assert part in message, message
            assert "\n" not in message, "one line, so that the command line can print it as it is"
            return swallowed

    return Check()


# -- text -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("empty", ["", "   ", "\n\t"])
def test_empty_text_raises(empty: str) -> None:
    with refused(InputError, "the text is empty"):
        text(empty)
    with refused(InputError, "text number 1 is empty"):
        text(["good", empty])


@pytest.mark.parametrize("nothing", [[], ()])
def test_empty_list_raises(nothing: Any) -> None:
    with refused(InputError):
        text(nothing)
    with refused(InputError):
        picture(nothing)


def test_text_without_tokens_raises() -> None:
    with refused(InputError, "no tokens"):
        text("\u200b")  # a zero-width space: not white space for Python, no token for the tokenizer


def test_too_long_text_raises_or_is_truncated(capfd: pytest.CaptureFixture[str]) -> None:
    limit = sst2().model.config.max_position_embeddings
    long = "very good " * limit
    with refused(InputError, f"at most {limit}", "truncate=True", "--truncate"):
        text(long)
    with refused(InputError, f"at most {limit}"):
        list(whyformer.explain_many(sst2().model, [long, long], "raw_attention", processor=sst2().processor))
    assert "longer than" not in capfd.readouterr().err  # the tokenizer's own note, which names no way out
    cut = text(long, truncate=True)
    assert cut.scores.shape == (1, limit)
    assert text(["fine", long], truncate=True).scores.shape == (2, limit)


def test_too_many_ids_raise() -> None:
    model, _ = build("bert")
    with refused(InputError, "33 tokens", "at most 32"):
        explain(model, {"input_ids": torch.ones(1, 33, dtype=torch.long)})


def test_padding_offset_of_roberta_counts() -> None:
    """32 positions, of which the first two are for padding: 30 tokens."""
    model, _ = build("roberta")
    assert explain(model, {"input_ids": torch.full((1, 30), 5)}).scores.shape == (1, 30)
    with refused(InputError, "at most 30"):
        explain(model, {"input_ids": torch.full((1, 31), 5)})


def test_text_without_tokenizer_raises() -> None:
    with refused(InputError, "tokenizer", "AutoTokenizer"):
        explain(without_origin(sst2().model), "a fine film")
    with refused(InputError, "tokenizer"):
        explain(sst2().model, "a fine film", processor=digits().processor)


@pytest.mark.parametrize("wrong", [50, 10**6, -1])
def test_ids_outside_the_vocabulary_raise(wrong: int) -> None:
    model, inputs = build("bert")
    inputs["input_ids"][1, 3] = wrong
    with refused(InputError, str(wrong), "vocabulary of 50", "tokenizer"):
        explain(model, inputs)


# -- pictures -----------------------------------------------------------------------------------------------------------
def test_image_without_processor_raises() -> None:
    with refused(InputError, "image processor", "AutoImageProcessor"):
        explain(without_origin(digits().model), Image.new("RGB", (112, 112)))


def test_decompression_bomb_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pixels is checked before the image is decoded or converted."""
    monkeypatch.setattr("whyformer.inputs.pictures.MAX_PIXELS", 2_000_000)
    with refused(InputError, "2000 x 1500 pixels", "2 megapixels", "scale it down"):
        picture(Image.new("1", (2000, 1500)))


def test_empty_image_raises() -> None:
    with refused(InputError, "empty"):
        picture(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I", "F"])
def test_images_of_every_mode_are_explained(mode: str) -> None:
    assert picture(Image.new(mode, (50, 60))).scores.shape == (1, 14 * 14)


def test_invalid_processor_raises() -> None:
    with refused(InputError, "processor must be", "str"):
        explain(digits().model, Image.new("RGB", (9, 9)), processor="tokenizer")
    with refused(InputError, "[C, H, W]"):
        explain(digits().model, Image.new("RGB", (9, 9)), processor=lambda p: torch.zeros(2, 2))


@pytest.mark.parametrize("method", ["transformer_attribution", "rollout", "integrated_gradients"])
def test_image_tensor_of_wrong_size_raises(method: str) -> None:
    model, _ = build("hf_vit", torch.float32)
    with refused(InputError, "48×32", "takes 32×32", "processor"):
        whyformer.explain(model, torch.randn(1, 3, 48, 32), method)


def test_processor_function_with_unequal_sizes_raises() -> None:
    def processor(image: Image.Image) -> Tensor:
        return torch.zeros(3, image.height, image.width)

    with refused(InputError, "same size"):
        explain(build("hf_vit")[0], [Image.new("RGB", (32, 32)), Image.new("RGB", (32, 40))], processor=processor)


# -- tensors --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_raises(value: float) -> None:
    model, inputs = build("hf_vit")
    inputs[1, 0, 5, 5] = value
    with refused(InputError, "NaN or infinity", "preprocessing"):
        explain(model, inputs)


def test_empty_batch_raises() -> None:
    model, inputs = build("hf_vit")
    with refused(InputError, "batch is empty"):
        explain(model, inputs[:0])
    model, inputs = build("bert")
    with refused(InputError, "batch is empty"):
        explain(model, {k: v[:0] for k, v in inputs.items()})
    with refused(InputError):
        explain(model, {k: v[:, :0] for k, v in inputs.items()})


def test_batch_axis_is_added_to_a_single_sample() -> None:
    model, inputs = build("bert")
    single = explain(model, inputs["input_ids"][0])
    assert torch.equal(single.scores, explain(model, inputs["input_ids"][:1]).scores)
    assert single.diagnostics["input"] == [["a batch axis was added to the input"]]
    both = explain(model, {name: value[1] for name, value in inputs.items()})
    assert torch.equal(both.scores, explain(model, {name: value[1:] for name, value in inputs.items()}).scores)
    for name in ("hf_vit", "timm_vit", "torchvision_vit"):
        model, x = build(name)
        single = explain(model, x[1], "input_x_gradient")
        assert torch.equal(single.scores, explain(model, x[1:], "input_x_gradient").scores)
    with refused(InputError, "leading axis"):
        explain(model, torch.zeros(32, 32))


@pytest.mark.parametrize("inputs", [None, 3, 2.5, {}, {"input_ids": None}, {"input_ids": [1, 2]}, ["text", 3], b"text", object()])
def test_inputs_of_unknown_type_raise(inputs: Any) -> None:
    with refused(InputError):
        explain(build("bert")[0], inputs)


def test_list_of_images_and_texts_raises() -> None:
    with refused(InputError):
        picture([Image.new("RGB", (9, 9)), "text"])


# -- the class --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [5, 1000, -1])
@pytest.mark.parametrize("name", ["bert", "timm_vit"])
def test_class_out_of_range_raises(name: str, index: int) -> None:
    model, inputs = build(name)
    with refused(InputError, f"class {index} ", "5 classes, 0 to 4"):
        explain(model, inputs, target=index)
    with refused(InputError, f"class {index} "):
        explain(model, inputs, target=[0, index])


def test_class_out_of_range_raises_without_configured_number_of_classes() -> None:
    """The number of classes is known only from the logits."""
    model, inputs = build("encoder_mean")
    with refused(InputError, "class 5 ", "5 classes, 0 to 4"):
        explain(model, inputs, target=5)


@pytest.mark.parametrize("target", [whyformer.targets.Logit(5), whyformer.targets.Contrast(0, 9), whyformer.targets.Probability([0, 7])])
def test_target_with_class_out_of_range_raises(target: Any) -> None:
    model, inputs = build("bert")
    with refused(InputError, "out of range"):
        explain(model, inputs, target=target)


def test_unknown_class_name_raises() -> None:
    with refused(InputError, "no class 'negativ'", "Did you mean", "negative"):
        text("a fine film", target="negativ")
    with refused(InputError, "no class 'cow'"):
        text("a fine film", target="cow")
    with refused(InputError, "pass an index"):
        explain(*build("bert"), target="cow")


@pytest.mark.parametrize("labels", [("tench, Tinca tinca", "Goldfish", "HAMMERHEAD"), ("TENCH", "goldfish", "hammerhead")])
@pytest.mark.parametrize(("name", "meant"), [("TENC", "tench"), ("tenchs", "tench"), ("GOLDFISHS", "goldfish"), ("Hammer", "hammerhead")])
def test_similar_class_names_are_suggested_in_any_case(labels: tuple[str, ...], name: str, meant: str) -> None:
    with pytest.raises(InputError, match="no class") as raised:
        class_index(name, dict(enumerate(labels)))
    suggested = str(raised.value).partition("Did you mean '")[2].partition("'")[0]
    assert suggested.casefold() == meant and any(suggested in label for label in labels)


def test_class_names_ignore_case_and_may_be_indices() -> None:
    labels = sst2().model.config.id2label
    for index, label in labels.items():
        assert text("a fine film", target=label.upper()).target.item() == int(index)
        assert text("a fine film", target=str(index)).target.item() == int(index)


def test_ambiguous_class_name_raises() -> None:
    model, inputs = build("bert")
    model.config.id2label = {0: "crane, bird", 1: "crane, machine", 2: "a", 3: "b", 4: "c"}
    with refused(InputError, "several classes", "0 (crane, bird)", "1 (crane, machine)", "Pass the index"):
        explain(model, inputs, target="crane")


@pytest.mark.parametrize("target", [True, 1.5, [0, 1.5], [True, False], object(), {"class": 1}])
def test_target_of_unknown_type_raises(target: Any) -> None:
    with refused(InputError):
        explain(*build("bert"), target=target)


@pytest.mark.parametrize("target", [[0], [0, 1, 2], []])
def test_wrong_number_of_targets_raises(target: list[int]) -> None:
    with refused(InputError, f"{len(target)} targets for 2 samples"):
        explain(*build("bert"), target=target)


@dataclass(frozen=True)
class OfOneSample(whyformer.targets.RowTarget):
    """A target that is called with ``[B, C]``, but reads ``[C]``."""

    index: int = 0

    def __call__(self, logits: Tensor) -> Tensor:
        return logits[self.index] - logits[1]


def test_target_function_must_return_one_number_per_sample() -> None:
    model, inputs = build("bert")
    with refused(InputError, "one number per sample"):
        explain(model, inputs, target=OfOneSample())
    with refused(InputError, "one number per sample"):
        explain(model, inputs, target=lambda logits: logits)
    with refused(InputError, "one number per sample"):
        explain(model, inputs, target=lambda logits: logits.sum())
    with refused(InputError, "does not depend on the logits"):
        explain(model, inputs, target=lambda logits: torch.ones(2, requires_grad=True))


def test_non_differentiable_target_function_raises() -> None:
    with refused(InputError, "does not depend on the logits"):
        explain(*build("bert"), target=lambda logits: logits.argmax(-1).double())


# -- the method -----------------------------------------------------------------------------------------------------------
def test_mapping_without_a_tensor_names_the_kinds() -> None:
    with refused(InputError, "no tensor among the inputs (question, context)", "text_pair"):
        explain(build("bert")[0], {"question": "Who?", "context": "Sam."})


def test_unknown_method_raises() -> None:
    with refused(InputError, "no method 'rolout'", "Did you mean 'rollout'?", "transformer_attribution"):
        explain(*build("bert"), method="rolout")


@pytest.mark.parametrize("values", [torch.ones(2, 4), torch.ones(2, 99), torch.ones(2, 9).long()])
def test_method_of_ones_own_with_another_result_raises(monkeypatch: pytest.MonkeyPatch, values: Any) -> None:
    monkeypatch.setitem(METHODS, "own", METHODS["saliency"])

    @method("a method", family="attention", citation="none")
    def own(task: Task) -> Any:
        """Return scores that are not one number for each token."""
        return Scores(values, task.forward())

    with refused(InputError, "the method own must return"):
        explain(*build("bert"), "own")


def test_unknown_setting_raises_with_suggestion() -> None:
    with refused(InputError, "no setting 'start_block'", "start_layer=0"):
        explain(*build("bert"), "transformer_attribution", start_block=1)
    with refused(InputError, "Did you mean 'start_layer'?"):
        explain(*build("bert"), "transformer_attribution", start_layr=1)
    with refused(InputError, "auto has no setting 'start_layer'", "methods with this setting: transformer_attribution, "):
        explain(*build("bert"), start_layer=1)


# -- the model --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [None, 3, lambda x: x, nn.Linear])
def test_model_that_is_no_module_raises(model: Any) -> None:
    with refused(ModelError, "torch.nn.Module"):
        explain(model, torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("output", ["nothing", "a number", "a word", "dense"])
def test_model_without_logits_raises(output: str) -> None:
    class NoLogits(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"nothing": None, "a number": 3.0, "a word": "cat", "dense": x}[output]

    # any element of a tensor can be the target, so the target is what is missing
    with refused(InputError, "targets.Pixel") if output == "dense" else refused(ModelError, "[batch, classes]"):
        explain(NoLogits().eval(), torch.zeros(1, 3, 8, 8), method="input_x_gradient")


def test_device_and_dtype_require_a_model_name() -> None:
    model, inputs = build("bert")
    for options in ({"device": "cpu"}, {"dtype": "float64"}):
        with refused(InputError, "model.to"):
            explain(model, inputs, **options)
    with refused(InputError, "model.to"):
        whyformer.evaluate(model, inputs, np.zeros((1, 4)), device="cpu")


def test_unknown_device_or_dtype_raises() -> None:
    with refused(InputError, "dtype must be one of", "float32", "'float31'"):
        explain("bundled:sst2", "a fine film", dtype="float31")
    with refused(InputError, "there is no device 'gpu'"):
        explain("bundled:sst2", "a fine film", device="gpu")
    if not torch.cuda.is_available():
        with refused(InputError, "'cuda'", "use 'cpu'"):
            explain("bundled:sst2", "a fine film", device="cuda")


# -- loading ----------------------------------------------------------------------------------------------------------------
def test_uncached_model_without_network_raises() -> None:
    """The tests run with HF_HUB_OFFLINE=1."""
    with refused(LoadError, "cannot load 'someone/no-such-model'", "network", "local folder"):
        explain("someone/no-such-model", "a fine film")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "my model"])
def test_missing_model_folder_raises(name: str) -> None:
    with refused(LoadError, "no such folder"):
        explain(name, "a fine film")


def test_unknown_bundled_model_raises() -> None:
    with refused(LoadError, "no bundled model 'imagenet'", "bundled:digits", "bundled:sst2"):
        explain("bundled:imagenet", "a fine film")


def test_model_folder_without_config_raises(tmp_path: Path) -> None:
    with refused(LoadError, "no config.json", "save_pretrained"):
        explain(str(tmp_path), "a fine film")


def test_model_folder_without_safetensors_raises(tmp_path: Path) -> None:
    """Pickled weights can run arbitrary code and are never loaded."""
    model, _ = build("bert")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with refused(LoadError, "pickled weights are not loaded", "save_pretrained"):
        explain(str(tmp_path), "a fine film")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no-such-type"}'])
def test_broken_config_raises(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with refused(LoadError, "cannot load"):
        explain(str(tmp_path), "a fine film")


def test_truncated_weights_raise(tmp_path: Path) -> None:
    model, _ = build("bert")
    model.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with refused(LoadError, "cannot load"):
        explain(str(tmp_path), "a fine film")


def test_model_without_trained_head_raises(tmp_path: Path) -> None:
    """Transformers would load it with a random classifier."""
    model, _ = build("bert")
    model.bert.save_pretrained(tmp_path)
    with refused(LoadError):
        explain(str(tmp_path), "a fine film")


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "was_run"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}, "architectures": ["BertForSequenceClassification"]}))
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with refused(LoadError, "cannot load"):
        explain(str(tmp_path), "a fine film")
    assert not mark.exists()


# -- files of explanations ------------------------------------------------------------------------------------------------
def test_loading_a_file_that_is_no_explanation_raises(tmp_path: Path) -> None:
    with refused(LoadError, "no such file"):
        whyformer.Explanation.load(tmp_path / "none.safetensors")
    (tmp_path / "other").write_bytes(b"something else")
    with refused(LoadError, "not a saved explanation"):
        whyformer.Explanation.load(tmp_path / "other")


def test_errors_are_whyformer_errors_and_builtin_errors() -> None:
    """``except ValueError`` keeps working, and WhyformerError catches all."""
    assert issubclass(InputError, WhyformerError) and issubclass(InputError, ValueError)
    assert issubclass(LoadError, WhyformerError) and issubclass(LoadError, OSError)
    assert issubclass(ModelError, WhyformerError) and issubclass(ModelError, ValueError)


# -- labels and tuple outputs -----------------------------------------------------------------------------------------
def test_labels_are_dropped_with_a_note() -> None:
    model, inputs = build("bert")
    plain = explain(model, inputs, "input_x_gradient")
    labelled = explain(model, {**inputs, "labels": torch.tensor([1, 2])}, "input_x_gradient")
    assert torch.equal(labelled.scores, plain.scores)
    assert torch.equal(labelled.logits, plain.logits)
    (note,) = labelled.diagnostics["input"][1]
    assert note.endswith("labels")
    assert "input" not in plain.diagnostics

    class RequiresLabels(nn.Module):
        """A model whose forward requires labels."""

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            assert set(labels.tolist()) <= {1, 2}
            return model(input_ids).logits

    assert explain(RequiresLabels().eval(), {"input_ids": inputs["input_ids"], "labels": torch.tensor([1, 2])}, "occlusion", baseline=1).logits.shape == (2, 5)


def test_labels_of_encoder_decoder_become_decoder_input_ids() -> None:
    model, inputs = build("t5")
    labels = inputs["input_ids"][:, 1:6]
    shifted = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :-1]], 1)
    e = explain(model, {**inputs, "labels": labels}, "input_x_gradient")
    assert torch.equal(e.logits, explain(model, {**inputs, "decoder_input_ids": shifted}, "input_x_gradient").logits)
    assert "decoder's tokens" in e.diagnostics["input"][0][0]


@pytest.mark.parametrize("where", ["call", "config"])
def test_tuple_output_equals_named_output(where: str) -> None:
    from test_output_targets import MODELS

    model, inputs = MODELS["answers"]()
    expected = explain(model, inputs, "input_x_gradient", "Span(2, 5)")
    if where == "config":
        model.config.return_dict = False
    else:
        inputs["return_dict"] = False
    assert torch.equal(explain(model, inputs, "input_x_gradient", "Span(2, 5)").scores, expected.scores)
    with refused(InputError, "targets.Span"):
        explain(model, inputs, "input_x_gradient")


def test_tuple_output_of_text_input_resolves_span_target() -> None:
    import transformers

    from test_output_targets import SMALL, random_model

    tokenizer = sst2().processor
    model = random_model("BertForQuestionAnswering", transformers.BertConfig(**{**SMALL, "vocab_size": len(tokenizer)}))
    model.config.return_dict = False
    e = explain(model, "who was it, a charming film", "input_x_gradient", "Span(2, 3)", processor=tokenizer)
    assert e.target_names == ["span 2 to 3"]


# -- more invalid targets and images -----------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [np.int64(2), np.array(2), torch.tensor(2), np.array([2, 2]), [np.int64(2), torch.tensor(2)], "2"])
def test_integers_of_any_type_are_class_indices(given: Any) -> None:
    model, inputs = build("bert")
    assert torch.equal(explain(model, inputs, "input_x_gradient", given).scores, explain(model, inputs, "input_x_gradient", 2).scores)


@pytest.mark.parametrize("given", [True, np.bool_(True), torch.tensor(True), 2.0, [True, False], torch.tensor([1.0, 2.0])])
def test_booleans_and_floats_are_no_class_indices(given: Any) -> None:
    model, inputs = build("bert")
    with refused(InputError, "a class is an index or a name"):
        explain(model, inputs, "input_x_gradient", given)


@pytest.mark.parametrize("method", ["input_x_gradient", "occlusion", "lrp"])
def test_target_function_must_return_a_tensor_per_sample(method: str) -> None:
    model, inputs = build("bert")
    with refused(InputError, "must return a tensor", "shape [2]", "not float", ".item()"):
        explain(model, inputs, method, lambda logits: logits[0, 1].item())
    with refused(InputError, "one number per sample", "[2]", "not [2, 5]"):
        explain(model, inputs, method, lambda logits: logits)
    alone = {name: value[:1] for name, value in inputs.items()}
    scalar = explain(model, alone, method, lambda logits: logits[0, 1])
    assert torch.equal(scalar.scores, explain(model, alone, method, 1).scores)


def test_wrong_channels_raise() -> None:
    for name in ("hf_vit", "timm_vit"):
        model, x = build(name)
        with refused(InputError, "3 channels", "[2, 1, 32, 32]"):
            explain(model, x[:, :1], "input_x_gradient")
        with refused(InputError, "3 channels", "come last"):
            explain(model, x.permute(0, 2, 3, 1), "input_x_gradient")


def test_image_with_tokenizer_raises() -> None:
    with refused(InputError, "tokenizer", "AutoImageProcessor"):
        explain(digits().model, Image.new("RGB", (112, 112)), processor=sst2().processor)


@pytest.mark.parametrize(("labels", "names"), [({f"word {i}": i for i in range(5)}, "word 2"), ({f"word {i}": "x" for i in range(5)}, "2")])
def test_inverted_id2label_gives_class_names(labels: dict[str, Any], names: str) -> None:
    model, inputs = build("bert")
    model.config.id2label = labels
    assert explain(model, inputs, "input_x_gradient", 2).target_names == [names] * 2


def test_detached_target_raises() -> None:
    model, inputs = build("bert")
    with refused(InputError, "does not depend on the logits"):
        explain(model, inputs, "input_x_gradient", lambda logits: logits.detach()[:, 0])
    from test_output_targets import MODELS

    model, inputs = MODELS["headless"]()
    with refused(ModelError, "a target function", "detaches"):
        explain(model, inputs, "input_x_gradient", lambda output: output.pooler_output.detach()[:, 0])


@pytest.mark.parametrize("shape", [(2, 32, 32, 3), (2, 4, 32, 16, 3), (2, 24, 32, 1)])
def test_channels_last_input_raises(shape: tuple[int, ...]) -> None:
    """Also for a model that expects channels last: each score would be a sum over an image row."""

    class ChannelsLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(shape[-1], 4)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.head(pixel_values.flatten(1, -2).mean(1))

    model, pictures = ChannelsLast().eval(), torch.randn(shape)
    with refused(InputError, f"the {shape[-1]} channels", "come last", "permute the axes"):
        whyformer.explain(model, pictures, "input_x_gradient", 1)

    class ChannelsFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.model(pixel_values.movedim(-3, -1))

    e = whyformer.explain(ChannelsFirst().eval(), pictures.movedim(-1, -3), "input_x_gradient", 1)
    assert torch.allclose(e.scores, pictures @ model.head.weight[1] / pictures[0, ..., 0].numel(), atol=1e-6)


class Anything:
    """A value of no kind that a function takes."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@cache
def explained() -> whyformer.Explanation:
    return text("a good film", method="gae")


WRONG_VALUES: dict[str, tuple[str, Any]] = {
    "scores that are a method": ("explanation", lambda: whyformer.evaluate(sst2(), "a good film", "gae")),
    "trust in a method": ("explanation", lambda: whyformer.trust("gae", sst2(), "a good film")),
    "trust with one seed": ("seeds", lambda: whyformer.trust(explained(), sst2(), "a good film", seeds=3)),
    "trust with a list as baseline": ("baseline", lambda: whyformer.trust(explained(), sst2(), "a good film", baseline=[])),
    "deletion by a method": ("explanation", lambda: token_deletion(sst2(), "a good film", "gae")),
    "one method in compare": ("methods", lambda: whyformer.compare(sst2(), "a good film", 3)),
    "one target in compare": ("targets", lambda: whyformer.compare(sst2(), "a good film", ["gae"], 3)),
    "one candidate": ("candidates", lambda: whyformer.arbitrate(sst2(), "a good film", 3)),
    "seed of arbitrate": ("seed", lambda: whyformer.arbitrate(sst2(), "a good film", ["gae"], seed="a")),
    "held out": ("holdout", lambda: whyformer.arbitrate(sst2(), "a good film", ["gae"], holdout="half")),
    "token for removal": ("baseline", lambda: whyformer.arbitrate(sst2(), "a good film", ["gae"], baseline=0.5)),
    "truncate": ("truncate", lambda: text("a good film", truncate=Anything())),
    "checkpoint": ("checkpoint", lambda: text("a good film", checkpoint=Anything())),
    "rules": ("rules", lambda: whyformer.record(sst2(), "a good film", rules="gelu")),
    "progress": ("progress", lambda: text(["a good film"] * 40, progress="bar")),
    "gradient": ("gradient", lambda: whyformer.attention_maps(sst2(), "a good film", gradient=Anything())),
    "methods of many": ("method", lambda: whyformer.explain_many(sst2(), ["a good film"], 3)),
    "folder of many": ("out", lambda: whyformer.explain_many(sst2(), ["a good film"], "gae", out=3)),
    "drawn name": ("explanation", lambda: show.figure("gae")),
    "drawn number": ("explanation", lambda: show.fragment(3)),
    "drawn list of names": ("explanation", lambda: show.panels(["gae"])),
    "bars of a name": ("explanation", lambda: show.bars("gae")),
    "film of an explanation": ("explain_generation", lambda: show.film(explained())),
    "gallery of an explanation": ("maximize_activation", lambda: show.gallery(explained())),
    "strip of an explanation": ("perturbation_strip", lambda: show.strip(explained())),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_value_of_an_argument_raises(case: str) -> None:
    name, call = WRONG_VALUES[case]
    with refused(InputError, name):
        call()


@pytest.mark.parametrize("run", ["evaluate", "arbitrate", "compare", "record"])
def test_pictures_of_wrong_size_raise_in_every_function(run: str) -> None:
    pixels, scores = torch.zeros(1, 3, 20, 20), torch.rand(1, 20, 20)
    calls: dict[str, Any] = {
        "evaluate": lambda: whyformer.evaluate(digits(), pixels, scores), "record": lambda: whyformer.record(digits(), pixels),
        "arbitrate": lambda: whyformer.arbitrate(digits(), pixels, ["gae", "rollout"]),
        "compare": lambda: whyformer.compare(digits(), pixels, ["gae"], likeliest=2),
    }  # fmt: skip
    with refused(InputError, "20×20", "112×112"):
        calls[run]()
