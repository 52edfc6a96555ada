"""Tokenize prompts, and generate or tokenize their answers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.explanation.counts import amount
from whyformer.generation.pictures import ExtraArguments, to_model
from whyformer.generation.streamer import Streamer
from whyformer.inputs.prepare import check_vocabulary, longest_text, named_special
from whyformer.inputs.prompts import formatted, is_chat, parts_of
from whyformer.models.output import decodes
from whyformer.targets.naming import continuation_ids

Turn = tuple[str, int, int]
_MARK = "\ufdd0whyformer\ufdd0"  # replaces the text of a message, to find its place in a chat template
# settings of a generation config with which generate is not greedy, changes the prompt or needs other packages
_SEARCHES = ("penalty_alpha", "dola_layers", "force_words_ids", "constraints", "num_beam_groups")
_OTHER_WAYS = (*_SEARCHES, "token_healing", "cache_implementation")
_READ = {"input_ids", "attention_mask"}
_KINDS = "a prompt is a text, a list of messages ({'role': ..., 'content': ...}), token ids"
_NO_TOKENIZER = "text needs the model's tokenizer: pass processor= (AutoTokenizer), or token ids"


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    Attributes:
        ids: token ids.
        text: the text, after a chat template has been applied; None if only ids were passed.
        special: whether the tokenizer added special tokens.
        turns: (role, start, end) character range of each message, with the text that a chat template adds.
        contents: (start, end) character range of the text of each message alone.
        extra: further arguments of the model's forward, for pictures.
    """

    ids: list[int]
    text: str | None = None
    special: bool = True
    turns: list[Turn] = field(default_factory=list)
    contents: list[tuple[int, int]] = field(default_factory=list)
    extra: ExtraArguments = field(default_factory=ExtraArguments)


@dataclass(frozen=True)
class Completion:
    """A tokenized prompt with its answer.

    Attributes:
        prompt, answer: token ids. The encoder of an encoder-decoder reads ``prompt``.
        begin: start tokens of the decoder of an encoder-decoder; else empty.
        turns: (role, start, end) token range of each message.
        special: indices of special tokens and of tokens of the chat template in prompt, begin and answer; None if
            unknown.
        notes: sentences on the tokenization.
        extra: further arguments of the model's forward, for pictures.
        generated: whether the model generated the answer.
    """

    prompt: list[int]
    answer: list[int]
    begin: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    special: list[int] | None = None
    notes: list[str] = field(default_factory=list)
    extra: ExtraArguments = field(default_factory=ExtraArguments)
    generated: bool = False


# -- prompts ---------------------------------------------------------------------------------------------------------
def read_prompts(value: Any, tokenizer: Any) -> tuple[list[Prompt], bool]:
    """Return (prompts, whether a single prompt was passed) of a text, messages, token ids, or a list of these.

    Padded ids are removed according to ``attention_mask``.

    Raises:
        InputError: a prompt is empty or of another kind.
    """
    if isinstance(value, Mapping) and "input_ids" in value:
        prompts = _tokenized(value)
        return _checked(prompts), len(prompts) == 1
    if isinstance(value, Tensor | np.ndarray):
        return _checked([Prompt(row) for row in _rows(value)]), value.ndim < 2 or len(value) == 1
    if isinstance(value, str) or is_chat(value) or _is_ids(value):
        return _checked([_prompt(value, tokenizer)]), True
    if isinstance(value, list | tuple) and value:
        return _checked([_prompt(item, tokenizer) for item in value]), False
    if isinstance(value, list | tuple):
        raise InputError("the list of prompts is empty")
    raise InputError(f"{_KINDS} or a list of these, not {type(value).__name__}")


def _tokenized(value: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a tokenizer's result."""
    rows, mask = _rows(value["input_ids"]), value.get("attention_mask")
    real = [[1] * len(row) for row in rows] if mask is None else _rows(mask, is_mask=True)
    if [len(r) for r in rows] != [len(m) for m in real]:
        raise InputError("attention_mask is not of the shape of input_ids")
    prompts = [Prompt(list(compress(*pair))) for pair in zip(rows, real, strict=True)]
    more = [n for n in value.keys() - _READ if not n.endswith("token_type_ids") or any(map(any, _rows(value[n])))]
    if more:
        raise InputError(
            f"a mapping is read for its input_ids and attention_mask, and this one has {', '.join(sorted(more))} too: "
            "pass these two alone, or a text with its pictures as images=, or explain a single token with explain()"
        )
    return prompts


def _rows(ids: Any, *, is_mask: bool = False) -> list[list[int]]:
    """Return the rows of token ids, or of a mask, ``[N]`` or ``[rows, N]``; lists may be of different lengths."""
    if isinstance(ids, list | tuple) and ids and all(isinstance(row, list | tuple) for row in ids):
        return [_rows(row, is_mask=is_mask)[0] for row in ids]
    try:
        values = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):  # it holds other values
        values = torch.zeros(())
    values = (values != 0).long() if is_mask or not values.numel() else values
    if values.is_floating_point() or values.dtype == torch.bool or values.dim() not in (1, 2):
        raise InputError(f"{'a mask holds' if is_mask else 'token ids are'} whole numbers, [N] or [prompts, N]")
    return (values if values.dim() == 2 else values[None]).tolist()


def _is_ids(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(i, Integral) and not isinstance(i, bool) for i in value)


def _checked(prompts: list[Prompt]) -> list[Prompt]:
    for i, prompt in enumerate(prompts):
        if not prompt.ids:
            raise InputError("the prompt is empty" if len(prompts) == 1 else f"prompt number {i} is empty")
    return prompts


def _prompt(value: Any, tokenizer: Any) -> Prompt:
    if isinstance(value, Tensor | np.ndarray) or _is_ids(value):
        rows = _rows(value)
        if len(rows) != 1:
            raise InputError(f"a tensor of {len(rows)} prompts is in a list: pass a list of one prompt each")
        return Prompt(rows[0])
    if not isinstance(value, str) and not is_chat(value):
        raise InputError(f"{_KINDS}, not {value!r:.60}")
    if tokenizer is None:
        raise InputError(_NO_TOKENIZER)
    if isinstance(value, str):
        if not value.strip():
            raise InputError("the prompt is empty")
        return Prompt(_encoded(tokenizer, value, True), value)
    return _conversation(list(value), tokenizer)


def _conversation(messages: list[Mapping[str, Any]], tokenizer: Any) -> Prompt:
    """Apply the tokenizer's chat template to a conversation, up to the beginning of the answer."""
    texts = [[part["text"] for part in parts_of(message)] for message in messages]
    if any(len(parts) > 1 for parts in texts):
        raise InputError("a message without pictures has one text: join the texts of its parts")
    messages = [{**message, "content": part_text} for message, (part_text,) in zip(messages, texts, strict=True)]
    text = formatted(messages, tokenizer)
    ends = [formatted(messages[: i + 1], tokenizer, answer=False) for i in range(len(messages))]

    def place(marked: list[Mapping[str, Any]]) -> tuple[int, int] | None:
        with suppress(InputError):  # a template may reject a system message, or the mark
            return _differing(text, formatted(marked, tokenizer))
        return None

    turns, contents, cursor = list[Turn](), list[tuple[int, int]](), 0
    system: Mapping[str, Any] = {"role": "system", "content": _MARK}
    if (content := place([system, *messages])) is not None and content[0] < content[1]:  # the template's system message
        suffix = formatted([system], tokenizer, answer=False).partition(_MARK)[2]
        cursor = content[1] + (len(suffix) if text.startswith(suffix, content[1]) else 0)
        turns, contents = [("system", 0, cursor)], [content]
    for i, (message, so_far) in enumerate(zip(messages, ends, strict=True)):
        content = place([*messages[:i], {**message, "content": _MARK}, *messages[i + 1 :]])
        end = max(content[1] if content else 0, len(so_far) if text.startswith(so_far) else 0)
        if end > cursor:
            turns.append((message["role"], cursor, end))
            contents.append(content or (cursor, end))
            cursor = end
    return Prompt(_encoded(tokenizer, text, False), text, False, turns, contents)


def _differing(text: str, marked: str) -> tuple[int, int] | None:
    """Return the (start, end) characters of a text in the place of the mark; None if the texts differ elsewhere."""
    before, mark, after = marked.partition(_MARK)
    start, end = len(before), len(text) - len(after)
    return (start, end) if mark and start <= end and text == before + text[start:end] + after else None


def _encoded(tokenizer: Any, text: str, special: bool) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]


# -- answers ---------------------------------------------------------------------------------------------------------
def complete(
    model: nn.Module, prompt: Prompt, continuation: Any, tokenizer: Any, count: int, streamer: Streamer | None = None
) -> Completion:
    """Return the prompt with its answer: ``continuation``, or at most ``count`` tokens that the model generates.

    Args:
        model: the language model.
        prompt: the prompt.
        continuation: the answer as text or token ids; None to generate it greedily.
        tokenizer: the model's tokenizer; None without one.
        count: largest number of generated tokens.
        streamer: receives each token while the model generates.

    Raises:
        InputError: the model cannot generate, the text is too long, or the continuation is of another kind.
    """
    decoder = decodes(model)
    notes: list[str] = []
    ids = prompt.ids
    if not decoder and tokenizer is not None and prompt.text is not None and prompt.special:
        ids = _without_end(ids, prompt.text, tokenizer)
    check_vocabulary(torch.tensor(ids), model)
    if continuation is None:
        generate = _generator(model)
        _check_length(len(ids), count, f"max_new_tokens={count}", model, tokenizer)
        begin, answer = _generated(model, generate, ids, count, prompt.extra, streamer, tokenizer)
    elif decoder:
        begin, answer = [_start(model)], _continuation_ids(continuation, tokenizer, target=True)
    elif isinstance(continuation, str) and prompt.text is not None:
        both = _encoded(tokenizer, prompt.text + continuation, prompt.special)
        both = _without_end(both, prompt.text + continuation, tokenizer) if prompt.special else both
        same = next((i for i, (a, b) in enumerate(zip(ids, both, strict=False)) if a != b), min(len(ids), len(both)))
        begin, answer = [], both[same:]
        if same < len(ids):
            merged, end = (tokenizer.decode(part) for part in (both[same : same + 1], ids[same:]))
            notes.append(
                f"the tokenizer merges the end of the prompt with the continuation: {merged!r} is its first token, so "
                f"{end!r} of the prompt counts as generated"
            )
        ids = both[:same]
    else:
        begin, answer = [], _continuation_ids(continuation, tokenizer)
    if not ids:
        raise InputError(
            "the tokenizer merges the whole prompt with the continuation, so no token precedes it: pass both as ids"
        )
    if not answer:
        raise InputError("the continuation is empty" if continuation is not None else "the model generated nothing")
    check_vocabulary(torch.tensor(answer), model)
    _check_length(len(ids), len(answer), f"the continuation of {amount(len(answer), 'token')}", model, tokenizer)
    turns, template = _turns(prompt, ids, answer, tokenizer)
    special = None if tokenizer is None else _special([*ids, *begin, *answer], template, tokenizer)
    return Completion(ids, answer, begin, turns, special, notes, prompt.extra, continuation is None)


def _check_length(prompt: int, answer: int, named: str, model: nn.Module, tokenizer: Any) -> None:
    """Raise if the prompt, with all but the last token of the answer, is longer than the model can read, or the answer
    longer than it can write."""
    limit, longest_answer = longest_text(model, tokenizer), longest_text(model, tokenizer, decoder=True)
    if limit is None or longest_answer is None:
        return
    room = limit if decodes(model) else limit - (answer - 1)
    if prompt <= room and answer <= longest_answer:
        return
    too_long = f"the prompt of {amount(prompt, 'token')} and {named} are too long: the model takes at most "
    if room < 1 or answer > longest_answer:
        raise InputError(f"{too_long}{longest_answer} tokens, so shorten the answer")
    raise InputError(
        f"{too_long}{limit} tokens. Shorten the prompt, or pass its last {amount(room, 'token')} as a list of ids; "
        "truncate= does not cut prompts, as their start may matter as much as their end"
    )


def _without_end(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """Remove the end-of-text token that a tokenizer appends, because the text continues."""
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    added = len(ids) > 1 and ids[-1] in ends and _encoded(tokenizer, text, False)[-1:] != ids[-1:]
    return ids[:-1] if added else ids


def _continuation_ids(continuation: Any, tokenizer: Any, *, target: bool = False) -> list[int]:
    """Return the token ids of a continuation, encoded as the decoder's text if ``target``."""
    if isinstance(continuation, str):
        if tokenizer is None:
            raise InputError(_NO_TOKENIZER)
        if target:
            return [int(i) for i in tokenizer(text_target=continuation, verbose=False)["input_ids"]]
        return continuation_ids(tokenizer, continuation)
    try:
        rows = _rows(continuation)
    except InputError as error:
        raise InputError(f"a continuation is a text or token ids, not {continuation!r:.60}") from error
    if len(rows) != 1:
        raise InputError(f"{len(rows)} continuations for one prompt")
    return rows[0]


def _start(model: nn.Module) -> int:
    """Return the start token of the decoder."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        start = getattr(config, "decoder_start_token_id", None)
        if isinstance(start, int):
            return start
    raise InputError(
        "the model's config has no start token for the decoder: set model.config.decoder_start_token_id"
    )


def _generator(model: nn.Module) -> Any:
    """Return the model's ``generate`` method."""
    able = getattr(model, "can_generate", None)
    generate: Any = getattr(model, "generate", None)
    if not callable(generate) or (callable(able) and not able()):
        raise InputError(
            f"{type(model).__name__} cannot generate text: for a language model, pass the answer as the continuation; "
            "for any other model, use explain"
        )
    return generate


def _generated(
    model: nn.Module,
    generate: Any,
    ids: list[int],
    count: int,
    extra: ExtraArguments,
    streamer: Streamer | None,
    tokenizer: Any,
) -> tuple[list[int], list[int]]:
    """Return (start tokens of the decoder, tokens generated greedily)."""
    arguments = to_model(model, {"input_ids": torch.tensor([ids]), **extra.arguments(len(ids))})
    config = getattr(model, "generation_config", None)
    settings: dict[str, Any] = {name: None for name in _OTHER_WAYS if getattr(config, name, None)}
    if getattr(config, "pad_token_id", None) is None:  # it is not used, but transformers warns if there is none
        ends = getattr(config, "eos_token_id", None)
        settings["pad_token_id"] = int(ends[0] if isinstance(ends, list) else ends or 0)
    if getattr(config, "stop_strings", None):
        if tokenizer is None:
            raise InputError("the model's generation config has stop_strings: pass its tokenizer as processor=")
        settings["tokenizer"] = tokenizer
    if streamer is not None and "streamer" in inspect.signature(generate).parameters:
        settings["streamer"] = streamer
    try:
        with torch.no_grad():
            rows = generate(
                attention_mask=torch.ones_like(arguments["input_ids"]), max_new_tokens=count, do_sample=False,
                num_beams=1, num_return_sequences=1, return_dict_in_generate=False, **settings, **arguments,
            )  # fmt: skip
    finally:
        if streamer is not None:
            streamer.end()
    tokens: list[int] = rows[0].tolist()
    return (tokens[:1], tokens[1:]) if decodes(model) else ([], tokens[len(ids) :])


def _turns(prompt: Prompt, ids: list[int], answer: list[int], tokenizer: Any) -> tuple[list[Turn], set[int]]:
    """Return the token range of each message, and the indices of tokens that the chat template adds.

    A token belongs to the message in which it begins. The answer is the last message.
    """
    if not prompt.turns or prompt.text is None or not getattr(tokenizer, "is_fast", False):
        return [], set()
    encoded = tokenizer(prompt.text, add_special_tokens=prompt.special, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"][: len(ids)]
    turns: list[Turn] = []
    for role, begin, end in prompt.turns:
        inside = [i for i, (a, b) in enumerate(offsets) if begin <= a < end and a <= b]
        if inside:
            turns.append((role, inside[0], inside[-1] + 1))
    content = {i for i, (a, b) in enumerate(offsets) if any(a < end and begin < b for begin, end in prompt.contents)}
    template = {i for i, (a, b) in enumerate(offsets) if a < b} - content
    return [*turns, ("assistant", len(ids), len(ids) + len(answer))], template


def _special(ids: list[int], template: set[int], tokenizer: Any) -> list[int]:
    """Return the indices of special tokens and of the template's tokens; [UNK] and [MASK] count as content."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
    special -= {getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "mask", "image", "video", "audio")}
    special |= set(named_special(tokenizer))
    return [place for place, i in enumerate(ids) if i in special or place in template]
