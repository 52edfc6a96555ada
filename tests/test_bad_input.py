"""Everything that a user may get wrong: a clear error that names the cause and the way out, before anything is computed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError, LoadError, ModelError, WhyformerError
from whyformer.models.loading import Loaded, load
from zoo import build

explain = whyformer.explain


def from_nowhere(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that does not say where it was loaded from, so that no processor can be found beside it."""
    import copy

    made = copy.deepcopy(model)
    made.config._name_or_path = ""
    return made


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
    """The error is of that kind, is still what Python programmers expect, and says all parts."""

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
def test_empty_text(empty: str) -> None:
    with refused(InputError, "the text is empty"):
        text(empty)
    with refused(InputError, "text number 1 is empty"):
        text(["good", empty])


@pytest.mark.parametrize("nothing", [[], ()])
def test_empty_list(nothing: Any) -> None:
    with refused(InputError):
        text(nothing)
    with refused(InputError):
        picture(nothing)


def test_text_that_holds_no_tokens() -> None:
    with refused(InputError, "no tokens"):
        text("\u200b")  # a zero-width space: not white space to Python, nothing to the tokenizer


def test_text_longer_than_the_model_takes() -> None:
    limit = sst2().model.config.max_position_embeddings
    long = "very good " * limit
    with refused(InputError, f"at most {limit}", "truncate=True", "--truncate"):
        text(long)
    cut = text(long, truncate=True)
    assert cut.scores.shape == (1, limit)
    assert text(["fine", long], truncate=True).scores.shape == (2, limit)


def test_ids_longer_than_the_model_takes() -> None:
    model, _ = build("bert")
    with refused(InputError, "33 tokens", "at most 32"):
        explain(model, {"input_ids": torch.ones(1, 33, dtype=torch.long)})


def test_the_padding_offset_of_roberta_counts() -> None:
    """32 positions, of which the first two are for padding: 30 tokens."""
    model, _ = build("roberta")
    assert explain(model, {"input_ids": torch.full((1, 30), 5)}).scores.shape == (1, 30)
    with refused(InputError, "at most 30"):
        explain(model, {"input_ids": torch.full((1, 31), 5)})


def test_text_without_a_tokenizer() -> None:
    with refused(InputError, "tokenizer", "AutoTokenizer"):
        explain(from_nowhere(sst2().model), "a fine film")
    with refused(InputError, "tokenizer"):
        explain(sst2().model, "a fine film", processor=digits().processor)


def test_a_batch_of_sentences_without_a_padding_token() -> None:
    import copy

    tokenizer = copy.deepcopy(sst2().processor)
    tokenizer.pad_token = None
    with refused(InputError, "padding token", "pad_token"):
        explain(sst2().model, ["fine", "a fine film"], processor=tokenizer)
    assert explain(sst2().model, "fine", processor=tokenizer).scores.isfinite().all()


@pytest.mark.parametrize("wrong", [50, 10**6, -1])
def test_ids_outside_the_vocabulary(wrong: int) -> None:
    model, inputs = build("bert")
    inputs["input_ids"][1, 3] = wrong
    with refused(InputError, str(wrong), "vocabulary of 50", "tokenizer"):
        explain(model, inputs)


# -- pictures -----------------------------------------------------------------------------------------------------------
def test_a_picture_without_a_processor() -> None:
    with refused(InputError, "image processor", "AutoImageProcessor"):
        explain(from_nowhere(digits().model), Image.new("RGB", (112, 112)))


def test_a_decompression_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number of pixels, before anything is decoded or converted."""
    monkeypatch.setattr("whyformer.inputs.pictures.MAX_PIXELS", 2_000_000)
    with refused(InputError, "2000 x 1500 pixels", "2 megapixels", "scale it down"):
        picture(Image.new("1", (2000, 1500)))


def test_an_empty_picture() -> None:
    with refused(InputError, "empty"):
        picture(Image.new("RGB", (0, 5)))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I", "F"])
def test_pictures_of_every_mode_are_taken(mode: str) -> None:
    assert picture(Image.new(mode, (50, 60))).scores.shape == (1, 14 * 14)


def test_a_processor_that_is_none() -> None:
    with refused(InputError, "processor must be", "str"):
        explain(digits().model, Image.new("RGB", (9, 9)), processor="tokenizer")
    with refused(InputError, "[C, H, W]"):
        explain(digits().model, Image.new("RGB", (9, 9)), processor=lambda p: torch.zeros(2, 2))


@pytest.mark.parametrize("method", ["transformer_attribution", "rollout", "integrated_gradients"])
def test_a_picture_tensor_of_another_size(method: str) -> None:
    model, _ = build("hf_vit", torch.float32)
    with refused(InputError, "48×32", "takes 32×32", "processor"):
        whyformer.explain(model, torch.randn(1, 3, 48, 32), method)


def test_pictures_of_different_sizes_from_a_function() -> None:
    def processor(image: Image.Image) -> Tensor:
        return torch.zeros(3, image.height, image.width)

    with refused(InputError, "same size"):
        explain(build("hf_vit")[0], [Image.new("RGB", (32, 32)), Image.new("RGB", (32, 40))], processor=processor)


# -- tensors --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_input_that_is_not_finite(value: float) -> None:
    model, inputs = build("hf_vit")
    inputs[1, 0, 5, 5] = value
    with refused(InputError, "NaN or infinity", "preprocessing"):
        explain(model, inputs)


def test_empty_batches() -> None:
    model, inputs = build("hf_vit")
    with refused(InputError, "batch is empty"):
        explain(model, inputs[:0])
    model, inputs = build("bert")
    with refused(InputError, "batch is empty"):
        explain(model, {k: v[:0] for k, v in inputs.items()})
    with refused(InputError):
        explain(model, {k: v[:, :0] for k, v in inputs.items()})


def test_a_sample_without_a_batch_axis() -> None:
    model, inputs = build("bert")
    one = explain(model, inputs["input_ids"][0])
    assert torch.equal(one.scores, explain(model, inputs["input_ids"][:1]).scores)
    assert one.diagnostics["input"] == [["a batch axis was added to the input"]]
    both = explain(model, {name: value[1] for name, value in inputs.items()})
    assert torch.equal(both.scores, explain(model, {name: value[1:] for name, value in inputs.items()}).scores)
    for name in ("hf_vit", "timm_vit", "torchvision_vit"):
        model, x = build(name)
        one = explain(model, x[1], "input_x_gradient")
        assert torch.equal(one.scores, explain(model, x[1:], "input_x_gradient").scores)
    with refused(InputError, "leading axis"):
        explain(model, torch.zeros(32, 32))


@pytest.mark.parametrize("inputs", [None, 3, 2.5, {}, {"input_ids": None}, {"input_ids": [1, 2]}, ["text", 3], b"text", object()])
def test_inputs_of_no_known_kind(inputs: Any) -> None:
    with refused(InputError):
        explain(build("bert")[0], inputs)


def test_a_mixed_list() -> None:
    with refused(InputError):
        picture([Image.new("RGB", (9, 9)), "text"])


# -- the class --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("index", [5, 1000, -1])
@pytest.mark.parametrize("name", ["bert", "timm_vit"])
def test_a_class_out_of_range(name: str, index: int) -> None:
    model, inputs = build(name)
    with refused(InputError, f"class {index} ", "5 classes, 0 to 4"):
        explain(model, inputs, target=index)
    with refused(InputError, f"class {index} "):
        explain(model, inputs, target=[0, index])


def test_a_class_out_of_range_of_a_model_that_does_not_say() -> None:
    """Found when the logits are there."""
    model, inputs = build("encoder_mean")
    with refused(InputError, "class 5 ", "5 classes, 0 to 4"):
        explain(model, inputs, target=5)


@pytest.mark.parametrize("target", [whyformer.targets.Logit(5), whyformer.targets.Contrast(0, 9), whyformer.targets.Probability([0, 7])])
def test_a_target_of_a_class_out_of_range(target: Any) -> None:
    model, inputs = build("bert")
    with refused(InputError, "out of range"):
        explain(model, inputs, target=target)


def test_an_unknown_class_name() -> None:
    with refused(InputError, "no class 'negativ'", "Did you mean", "negative"):
        text("a fine film", target="negativ")
    with refused(InputError, "no class 'cow'"):
        text("a fine film", target="cow")
    with refused(InputError, "pass an index"):
        explain(*build("bert"), target="cow")


def test_class_names_in_any_case_and_as_numbers() -> None:
    labels = sst2().model.config.id2label
    for index, label in labels.items():
        assert text("a fine film", target=label.upper()).target.item() == int(index)
        assert text("a fine film", target=str(index)).target.item() == int(index)


def test_an_ambiguous_class_name() -> None:
    model, inputs = build("bert")
    model.config.id2label = {0: "crane, bird", 1: "crane, machine", 2: "a", 3: "b", 4: "c"}
    with refused(InputError, "several classes", "0 (crane, bird)", "1 (crane, machine)", "Pass the index"):
        explain(model, inputs, target="crane")


@pytest.mark.parametrize("target", [True, 1.5, [0, 1.5], [True, False], object(), {"class": 1}])
def test_a_target_of_no_known_kind(target: Any) -> None:
    with refused(InputError):
        explain(*build("bert"), target=target)


@pytest.mark.parametrize("target", [[0], [0, 1, 2], []])
def test_a_wrong_number_of_targets(target: list[int]) -> None:
    with refused(InputError, f"{len(target)} targets for 2 samples"):
        explain(*build("bert"), target=target)


def test_target_functions_that_give_no_number_a_sample() -> None:
    model, inputs = build("bert")
    with refused(InputError, "one number per sample"):
        explain(model, inputs, target=lambda logits: logits)
    with refused(InputError, "one number per sample"):
        explain(model, inputs, target=lambda logits: logits.sum())
    with refused(InputError, "does not depend on the logits"):
        explain(model, inputs, target=lambda logits: torch.ones(2, requires_grad=True))


def test_a_target_function_without_a_gradient() -> None:
    with refused(InputError, "does not depend on the logits"):
        explain(*build("bert"), target=lambda logits: logits.argmax(-1).double())


# -- the method -----------------------------------------------------------------------------------------------------------
def test_an_unknown_method() -> None:
    with refused(InputError, "no method 'rolout'", "Did you mean 'rollout'?", "transformer_attribution"):
        explain(*build("bert"), method="rolout")


def test_an_unknown_setting_with_a_suggestion() -> None:
    with refused(InputError, "no setting 'start_block'", "start_layer=0"):
        explain(*build("bert"), "transformer_attribution", start_block=1)
    with refused(InputError, "Did you mean 'start_layer'?"):
        explain(*build("bert"), "transformer_attribution", start_layr=1)
    with refused(InputError, "auto has no setting 'start_layer'", "methods with this setting: transformer_attribution, "):
        explain(*build("bert"), start_layer=1)


# -- the model --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [None, 3, lambda x: x, nn.Linear])
def test_a_model_that_is_none(model: Any) -> None:
    with refused(ModelError, "torch.nn.Module"):
        explain(model, torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("output", ["nothing", "a number", "a word", "dense"])
def test_a_model_whose_output_is_no_logits(output: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"nothing": None, "a number": 3.0, "a word": "cat", "dense": x}[output]

    # of a tensor every number may be meant, so it is the target that is missing
    with refused(InputError, "targets.Pixel") if output == "dense" else refused(ModelError, "[batch, classes]"):
        explain(Odd().eval(), torch.zeros(1, 3, 8, 8), method="input_x_gradient")


def test_device_and_dtype_are_for_models_by_name() -> None:
    model, inputs = build("bert")
    for options in ({"device": "cpu"}, {"dtype": "float64"}):
        with refused(InputError, "model.to"):
            explain(model, inputs, **options)
    with refused(InputError, "model.to"):
        whyformer.evaluate(model, inputs, np.zeros((1, 4)), device="cpu")


def test_devices_and_dtypes_that_do_not_exist() -> None:
    with refused(InputError, "dtype must be one of", "float32", "'float31'"):
        explain("bundled:sst2", "a fine film", dtype="float31")
    with refused(InputError, "there is no device 'gpu'"):
        explain("bundled:sst2", "a fine film", device="gpu")
    if not torch.cuda.is_available():
        with refused(InputError, "'cuda'", "use 'cpu'"):
            explain("bundled:sst2", "a fine film", device="cuda")


# -- loading ----------------------------------------------------------------------------------------------------------------
def test_no_network_and_nothing_cached() -> None:
    """The tests run with HF_HUB_OFFLINE=1."""
    with refused(LoadError, "cannot load 'someone/no-such-model'", "network", "local folder"):
        explain("someone/no-such-model", "a fine film")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "", "my model"])
def test_a_folder_that_does_not_exist(name: str) -> None:
    with refused(LoadError, "no such folder"):
        explain(name, "a fine film")


def test_an_unknown_bundled_model() -> None:
    with refused(LoadError, "no bundled model 'imagenet'", "bundled:digits", "bundled:sst2"):
        explain("bundled:imagenet", "a fine film")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with refused(LoadError, "no config.json", "save_pretrained"):
        explain(str(tmp_path), "a fine film")


def test_a_folder_without_safe_weights(tmp_path: Path) -> None:
    """A pickle may run any code: never loaded."""
    model, _ = build("bert")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with refused(LoadError, "pickled weights are not loaded", "save_pretrained"):
        explain(str(tmp_path), "a fine film")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no-such-type"}'])
def test_a_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with refused(LoadError, "cannot load"):
        explain(str(tmp_path), "a fine film")


def test_broken_weights(tmp_path: Path) -> None:
    model, _ = build("bert")
    model.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with refused(LoadError, "cannot load"):
        explain(str(tmp_path), "a fine film")


def test_a_model_without_a_trained_head(tmp_path: Path) -> None:
    """It would load with a random classifier."""
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
def test_files_that_are_no_explanation(tmp_path: Path) -> None:
    with refused(LoadError, "no such file"):
        whyformer.Explanation.load(tmp_path / "none.safetensors")
    (tmp_path / "other").write_bytes(b"something else")
    with refused(LoadError, "not a saved explanation"):
        whyformer.Explanation.load(tmp_path / "other")


def test_every_error_is_a_whyformer_error_and_an_ordinary_one() -> None:
    """``except ValueError`` keeps working, and one name catches all."""
    assert issubclass(InputError, WhyformerError) and issubclass(InputError, ValueError)
    assert issubclass(LoadError, WhyformerError) and issubclass(LoadError, OSError)
    assert issubclass(ModelError, WhyformerError) and issubclass(ModelError, ValueError)


# -- arguments that make a loss ---------------------------------------------------------------------------------------
def test_labels_are_left_out_with_a_note() -> None:
    model, inputs = build("bert")
    plain = explain(model, inputs, "input_x_gradient")
    told = explain(model, {**inputs, "labels": torch.tensor([1, 2])}, "input_x_gradient")
    assert torch.equal(told.scores, plain.scores)
    assert torch.equal(told.logits, plain.logits)
    (note,) = told.diagnostics["input"][1]
    assert note.endswith("labels")
    assert "input" not in plain.diagnostics

    class Needs(nn.Module):
        """Its forward cannot do without labels: they are what it looks at."""

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            assert set(labels.tolist()) <= {1, 2}
            return model(input_ids).logits

    assert explain(Needs().eval(), {"input_ids": inputs["input_ids"], "labels": torch.tensor([1, 2])}, "occlusion", fill_id=1).logits.shape == (2, 5)


def test_the_labels_of_a_decoder_are_its_tokens() -> None:
    model, inputs = build("t5")
    labels = inputs["input_ids"][:, 1:6]
    shifted = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :-1]], 1)
    e = explain(model, {**inputs, "labels": labels}, "input_x_gradient")
    assert torch.equal(e.logits, explain(model, {**inputs, "decoder_input_ids": shifted}, "input_x_gradient").logits)
    assert "decoder's tokens" in e.diagnostics["input"][0][0]


@pytest.mark.parametrize("where", ["call", "config"])
def test_a_tuple_is_read_by_the_names_of_its_parts(where: str) -> None:
    from test_output_targets import MODELS

    model, inputs = MODELS["answers"]()
    wanted = explain(model, inputs, "input_x_gradient", "Span(2, 5)")
    if where == "config":
        model.config.return_dict = False
    else:
        inputs["return_dict"] = False
    assert torch.equal(explain(model, inputs, "input_x_gradient", "Span(2, 5)").scores, wanted.scores)
    with refused(InputError, "targets.Span"):
        explain(model, inputs, "input_x_gradient")


def test_so_it_is_of_a_sentence() -> None:
    import transformers

    from test_output_targets import SMALL, made

    tokenizer = sst2().processor
    model = made("BertForQuestionAnswering", transformers.BertConfig(**{**SMALL, "vocab_size": len(tokenizer)}))
    model.config.return_dict = False
    e = explain(model, "who was it, a charming film", "input_x_gradient", "Span(2, 3)", processor=tokenizer)
    assert e.target_names == ["span 2 to 3"]


# -- targets and pictures that do not fit ------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [np.int64(2), np.array(2), torch.tensor(2), np.array([2, 2]), [np.int64(2), torch.tensor(2)], "2"])
def test_numbers_of_any_kind_are_classes(given: Any) -> None:
    model, inputs = build("bert")
    assert torch.equal(explain(model, inputs, "input_x_gradient", given).scores, explain(model, inputs, "input_x_gradient", 2).scores)


@pytest.mark.parametrize("given", [True, np.bool_(True), torch.tensor(True), 2.0, [True, False], torch.tensor([1.0, 2.0])])
def test_truth_values_and_fractions_are_no_classes(given: Any) -> None:
    model, inputs = build("bert")
    with refused(InputError, "a class is an index or a name"):
        explain(model, inputs, "input_x_gradient", given)


@pytest.mark.parametrize("method", ["input_x_gradient", "occlusion", "lrp"])
def test_a_target_that_returns_something_else(method: str) -> None:
    model, inputs = build("bert")
    with refused(InputError, "must return a tensor", "shape [2]", "not float", ".item()"):
        explain(model, inputs, method, lambda logits: logits[0, 1].item())
    with refused(InputError, "one number per sample", "[2]", "not [2, 5]"):
        explain(model, inputs, method, lambda logits: logits)
    alone = {name: value[:1] for name, value in inputs.items()}
    scalar = explain(model, alone, method, lambda logits: logits[0, 1])
    assert torch.equal(scalar.scores, explain(model, alone, method, 1).scores)


def test_channels_that_do_not_fit() -> None:
    for name in ("hf_vit", "timm_vit"):
        model, x = build(name)
        with refused(InputError, "3 channels", "[2, 1, 32, 32]"):
            explain(model, x[:, :1], "input_x_gradient")
        with refused(InputError, "3 channels", "come last"):
            explain(model, x.permute(0, 2, 3, 1), "input_x_gradient")


def test_a_tokenizer_for_a_picture() -> None:
    with refused(InputError, "tokenizer", "AutoImageProcessor"):
        explain(digits().model, Image.new("RGB", (112, 112)), processor=sst2().processor)


@pytest.mark.parametrize(("labels", "names"), [({f"word {i}": i for i in range(5)}, "word 2"), ({f"word {i}": "x" for i in range(5)}, "2")])
def test_names_of_classes_the_other_way_round(labels: dict[str, Any], names: str) -> None:
    model, inputs = build("bert")
    model.config.id2label = labels
    assert explain(model, inputs, "input_x_gradient", 2).target_names == [names] * 2


def test_a_target_that_lets_no_gradient_through() -> None:
    model, inputs = build("bert")
    with refused(InputError, "does not depend on the logits"):
        explain(model, inputs, "input_x_gradient", lambda logits: logits.detach()[:, 0])
    from test_output_targets import MODELS

    model, inputs = MODELS["headless"]()
    with refused(ModelError, "a target function", "detaches"):
        explain(model, inputs, "input_x_gradient", lambda output: output.pooler_output.detach()[:, 0])


@pytest.mark.parametrize("shape", [(2, 32, 32, 3), (2, 4, 32, 16, 3), (2, 24, 32, 1)])
def test_channels_that_come_last(shape: tuple[int, ...]) -> None:
    """For a model that takes them so: a score would be a sum over a row of the picture."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(shape[-1], 4)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.head(pixel_values.flatten(1, -2).mean(1))

    model, pictures = Reads().eval(), torch.randn(shape)
    with refused(InputError, f"the {shape[-1]} channels", "come last", "permute the axes"):
        whyformer.explain(model, pictures, "input_x_gradient", 1)

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.model(pixel_values.movedim(-3, -1))

    e = whyformer.explain(Permuted().eval(), pictures.movedim(-1, -3), "input_x_gradient", 1)
    assert torch.allclose(e.scores, pictures @ model.head.weight[1] / pictures[0, ..., 0].numel(), atol=1e-6)
