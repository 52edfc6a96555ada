"""A text that needs more memory than is free is told before it is explained, with what to change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import whyformer
from whyformer.apps.web.work import Session
from whyformer.errors import InputError, MemoryWarning
from whyformer.explaining import begin
from whyformer.methods import METHODS, memory
from whyformer.models.memory import free_memory, total_memory, widths
from zoo import build, hf_vit

GB = 10**9


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets how many bytes are free, and how many there are."""

    def have(free: float, total: float = 10 * GB) -> None:
        monkeypatch.setattr(memory, "WORTH_A_LOOK", 0)
        monkeypatch.setattr(memory, "free_memory", lambda _: int(free))
        monkeypatch.setattr(memory, "total_memory", lambda _: int(total))

    return have


def llama() -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()


def bert() -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes)).eval()


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)).eval()


def test_what_there_is() -> None:
    place = torch.device("cpu")
    assert 0 < free_memory(place) <= total_memory(place)


def test_what_blocks_keep() -> None:
    """q 64, k and v 32 each, o 64, gate and up 160 each, down 64: 576 outputs, and half as much again."""
    assert widths(llama().model.layers) == (64, 3 * 576 * 3 // 2)


@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_the_estimate_is_of_the_right_size(make: Callable[[], nn.Module]) -> None:
    """Within a factor of two of what autograd keeps of a plain forward pass."""
    model = make().requires_grad_(False)
    ids = torch.randint(4, 40, (1, 40))
    needs = memory.needs(begin(model, {"input_ids": ids}).task(), METHODS["input_x_gradient"], {}, False)
    kept = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    embedded = model.get_input_embeddings()(ids).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs_embeds=embedded, use_cache=False)
    assert output is not None
    assert needs is not None
    assert sum(kept.values()) / 2 < needs.total < 2 * sum(kept.values())


def test_it_says_how_much_and_what_to_change(room: Callable[..., None]) -> None:
    model, inputs = llama(), {"input_ids": torch.randint(4, 40, (2, 40))}
    room(5e5)
    with pytest.warns(MemoryWarning, match=r"in a batch of 2 takes about .* kB .*checkpoint=True \(about .* kB\)"):
        found = whyformer.explain(model, inputs, "attnlrp", share=0.0)
    room(GB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(whyformer.explain(model, inputs, "attnlrp", share=0.0).scores, found.scores)


def test_what_is_impossible_is_refused(room: Callable[..., None]) -> None:
    model, inputs = build("bert", torch.float32)
    room(1e3, 2e3)
    with pytest.raises(InputError, match="half precision"):
        whyformer.explain(model, inputs, "transformer_attribution", 1)
    with pytest.raises(InputError, match="without maps"):
        whyformer.explain(model, inputs, "rollout")


def test_needs_grow_as_they_should() -> None:
    model = llama()

    def of(tokens: int, method: str, checkpoint: bool = False, **settings: Any) -> memory.Needs:
        task = begin(model, {"input_ids": torch.full((1, tokens), 5)}).task()
        found = memory.needs(task, METHODS[method], METHODS[method].complete(settings), checkpoint)
        assert found is not None
        return found

    assert of(64, "attnlrp").total == 2 * of(32, "attnlrp").total
    assert of(64, "rollout").maps == 4 * of(32, "rollout").maps
    assert of(64, "attnlrp", checkpoint=True).total < 0.5 * of(64, "attnlrp").total
    assert of(64, "attnlrp").total < of(64, "gim").total < of(64, "transformer_attribution").total
    assert of(64, "smoothgrad", batch_size=4).total == 4 * of(64, "saliency").total
    for method in METHODS.values():
        task = begin(model, {"input_ids": torch.full((1, 32), 5)}).task()
        found = memory.needs(task, method, method.settings, False)
        assert (found is None) == (method.family == "perturbation")
        assert found is None or found.least <= found.total


def test_pictures_are_not_estimated(room: Callable[..., None]) -> None:
    model, pixels = hf_vit()
    room(1, 1)
    whyformer.explain(model, pixels, "input_x_gradient")


def test_the_command_line_says_it_in_a_line(room: Callable[..., None]) -> None:
    from typer.testing import CliRunner

    from whyformer.apps import cli

    room(1e3)
    given = ["explain", "A charming film, though it drags.", "--method", "attnlrp", "-s", "share=0", "-f", "none"]
    result = CliRunner().invoke(cli.app, given)
    assert result.exit_code == 0
    (line,) = [own for own in result.stderr.splitlines() if own.startswith("warning: ")]
    assert "attnlrp of" in line
    assert "checkpoint=True" in line


def test_what_a_server_does_not_allow_is_refused_whatever_is_free(room: Callable[..., None]) -> None:
    session, (model, inputs) = Session(), build("bert", torch.float32)
    room(5 * GB)
    whyformer.explain(model, inputs, "rollout", progress=session.track(memory=GB))
    with pytest.raises(InputError, match=r"and 1 kB are allowed here: take .* or a shorter text"):
        whyformer.explain(model, inputs, "rollout", progress=session.track(memory=1e3))
