"""Prompts of every form as numbers of tokens, and the answer to each: generated, or given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.generation.pictures import Beside, fitted
from whyformer.generation.streamer import Streamer
from whyformer.inputs.prepare import check_vocabulary, longest_text, named_special
from whyformer.models.output import decodes
from whyformer.targets.naming import behind

Turn = tuple[str, int, int]
_MARK = "\ufdd0whyformer\ufdd0"  # a message's text, to see where a template puts it


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: numbers of its tokens.
        text: it as text, where it was given so (or as messages, of which a chat template made it).
        special: whether the tokenizer put special tokens of its own around it.
        turns: (role, first character, one after the last) of each message. contents: (first character, one after the
            last) of each message's text, without what a chat template writes around it.
        beside: what the model reads beside them: pictures.
    """

    ids: list[int]
    text: str | None = None
    special: bool = True
    turns: list[Turn] = field(default_factory=list)
    contents: list[tuple[int, int]] = field(default_factory=list)
    beside: Beside = field(default_factory=Beside)


@dataclass(frozen=True)
class Written:
    """A prompt and its answer, as they are fed.

    Attributes:
        prompt, answer: numbers of tokens; of an encoder–decoder ``prompt`` is what the encoder reads, and ``begin``
            what the decoder begins with (else empty).
        turns: (role, first token, one after the last) of each message.
        special: places of special tokens, the template's among them, in prompt, begin and answer; None if unknown.
        notes: what was done, in sentences.
        beside: what the model reads beside them: pictures.
    """

    prompt: list[int]
    answer: list[int]
    begin: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    special: list[int] | None = None
    notes: list[str] = field(default_factory=list)
    beside: Beside = field(default_factory=Beside)


# -- prompts ---------------------------------------------------------------------------------------------------------
def prompts_of(given: Any, tokenizer: Any) -> tuple[list[Prompt], bool]:
    """(prompts, whether one alone was given): text, messages, numbers of tokens, or several of these.

    Padding on either side of ids is left out, as their mask says.

    Raises:
        InputError: an empty prompt, or one of another kind.
    """
    if isinstance(given, Mapping) and "input_ids" in given:
        rows, mask = _rows(given["input_ids"]), given.get("attention_mask")
        kept = [[True] * len(r) for r in rows] if mask is None else [[bool(v) for v in m] for m in _rows(mask)]
        if [len(r) for r in rows] != [len(m) for m in kept]:
            raise InputError("attention_mask is not of the shape of input_ids")
        found = [Prompt([i for i, real in zip(r, m, strict=True) if real]) for r, m in zip(rows, kept, strict=True)]
        return _checked(found), len(found) == 1
    if isinstance(given, Tensor):
        return _checked([Prompt(row) for row in _rows(given)]), given.dim() < 2 or len(given) == 1
    if isinstance(given, str) or _is_chat(given) or _is_ids(given):
        return _checked([_one(given, tokenizer)]), True
    if isinstance(given, Sequence) and given:
        return _checked([_one(one, tokenizer) for one in given]), False
    if isinstance(given, Sequence):
        raise InputError("the list of prompts is empty")
    raise InputError(
        "a prompt is a text, a list of messages ({'role': ..., 'content': ...}), numbers of tokens, or a list of "
        f"these, not {type(given).__name__}"
    )


def _rows(given: Any) -> list[list[int]]:
    listed = torch.as_tensor(given)
    if listed.is_floating_point() or listed.dim() not in (1, 2):
        raise InputError("numbers of tokens are whole numbers, [N] or [prompts, N]")
    rows: list[list[int]] = (listed if listed.dim() == 2 else listed[None]).tolist()
    return rows


def _is_ids(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(type(i) is int for i in given)


def _is_chat(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(m, Mapping) for m in given)


def _checked(prompts: list[Prompt]) -> list[Prompt]:
    for i, prompt in enumerate(prompts):
        if not prompt.ids:
            raise InputError("the prompt is empty" if len(prompts) == 1 else f"prompt number {i} is empty")
    return prompts


def _one(given: Any, tokenizer: Any) -> Prompt:
    if isinstance(given, Tensor):
        return Prompt(_rows(given)[0])
    if _is_ids(given):
        return Prompt(list(given))
    if tokenizer is None:
        raise InputError("text needs the model's tokenizer: give processor= (AutoTokenizer), or numbers of tokens")
    if isinstance(given, str):
        if not given.strip():
            raise InputError("the prompt is empty")
        return Prompt(_encoded(tokenizer, given, True), given)
    if _is_chat(given):
        return _conversation(list(given), tokenizer)
    raise InputError(f"a prompt is a text, a list of messages or numbers of tokens, not {given!r:.60}")


def _conversation(messages: list[Mapping[str, Any]], tokenizer: Any) -> Prompt:
    """A conversation as the tokenizer's template writes it, up to where the answer begins."""
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise InputError(f"a message has a role and a content, both text, not {dict(message)!r:.80}")
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("this tokenizer has no chat template, so messages cannot be written down: give a text")

    def written(messages: list[Mapping[str, Any]], answer: bool = True) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))

    try:
        whole = written(messages)
        ends = [written(messages[: i + 1], False) for i in range(len(messages))]
    except Exception as error:  # a template's own, of whatever kind
        raise InputError(f"the tokenizer's chat template refuses these messages: {error}") from error

    def place(marked: list[Mapping[str, Any]]) -> tuple[int, int] | None:
        with suppress(Exception):  # the template refuses these: a system message, or the mark
            return _differing(whole, written(marked))
        return None

    turns, contents, cursor = list[Turn](), list[tuple[int, int]](), 0
    system: Mapping[str, Any] = {"role": "system", "content": _MARK}
    if (found := place([system, *messages])) is not None and found[0] < found[1]:  # one of the template's own
        behind = written([system], False).partition(_MARK)[2]
        cursor = found[1] + (len(behind) if whole.startswith(behind, found[1]) else 0)
        turns, contents = [("system", 0, cursor)], [found]
    for i, (message, so_far) in enumerate(zip(messages, ends, strict=True)):
        found = place([*messages[:i], {**message, "content": _MARK}, *messages[i + 1 :]])
        end = max(found[1] if found else 0, len(so_far) if whole.startswith(so_far) else 0)
        if end > cursor:
            turns.append((message["role"], cursor, end))
            contents.append(found or (cursor, end))
            cursor = end
    return Prompt(_encoded(tokenizer, whole, False), whole, False, turns, contents)


def _differing(whole: str, marked: str) -> tuple[int, int] | None:
    """(first character, one after the last) of what stands in ``whole`` where the other has the mark; None where they
    differ elsewhere too."""
    before, found, after = marked.partition(_MARK)
    first, last = len(before), len(whole) - len(after)
    return (first, last) if found and first <= last and whole == before + whole[first:last] + after else None


def _encoded(tokenizer: Any, text: str, special: bool) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]


# -- answers ---------------------------------------------------------------------------------------------------------
def answered(
    model: nn.Module, prompt: Prompt, continuation: Any, tokenizer: Any, count: int, streamer: Streamer | None = None
) -> Written:
    """The prompt with its answer: ``continuation``, or the likeliest tokens one after another, ``count`` at most.

    Args:
        streamer: receives each token while the model generates.

    Raises:
        InputError: the model cannot generate, the text is too long, or the continuation is of another kind.
    """
    decoder = decodes(model)
    notes: list[str] = []
    ids = prompt.ids
    if not decoder and tokenizer is not None and prompt.text is not None and prompt.special:
        ids = _open(ids, prompt.text, tokenizer)
    limit = longest_text(model, tokenizer)
    check_vocabulary(torch.tensor(ids), model)
    if continuation is None:
        generate = _generator(model)
        asked = f"the prompt of {len(ids)} tokens and max_new_tokens={count}"
        _fitting(len(ids) + (0 if decoder else count), limit, asked)
        begin, answer = _generated(model, generate, ids, count, decoder, prompt.beside, streamer)
    elif decoder:
        begin, answer = [_start(model)], _own_ids(continuation, tokenizer, target=True)
    elif isinstance(continuation, str) and prompt.text is not None:
        whole = _encoded(tokenizer, prompt.text + continuation, prompt.special)
        whole = _open(whole, prompt.text + continuation, tokenizer) if prompt.special else whole
        same = next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole)))
        begin, answer = [], whole[same:]
        if same < len(ids):
            merged, own = (tokenizer.decode(part) for part in (whole[same : same + 1], ids[same:]))
            notes.append(
                f"the tokenizer merges the end of the prompt with the continuation: {merged!r} is its first token, so "
                f"{own!r} of the prompt counts as generated"
            )
        ids = whole[:same]
    else:
        begin, answer = [], _own_ids(continuation, tokenizer)
    if not ids:
        raise InputError("the tokenizer merges the whole prompt with the continuation: nothing stands before it")
    if not answer:
        raise InputError("the continuation is empty" if continuation is not None else "the model generated nothing")
    check_vocabulary(torch.tensor(answer), model)
    _fitting(len(answer) if decoder else len(ids) + len(answer), limit, "prompt and continuation together")
    turns, template = _turns(prompt, ids, answer, tokenizer)
    special = None if tokenizer is None else _special([*ids, *begin, *answer], template, tokenizer)
    return Written(ids, answer, begin, turns, special, notes, prompt.beside)


def _fitting(tokens: int, limit: int | None, what: str) -> None:
    if limit is not None and tokens > limit:
        raise InputError(f"{what} make {tokens} tokens and the model takes at most {limit}: shorten them")


def _open(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    """Without a token that the tokenizer puts behind a text to end it: it goes on."""
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    added = len(ids) > 1 and ids[-1] in ends and _encoded(tokenizer, text, False)[-1:] != ids[-1:]
    return ids[:-1] if added else ids


def _own_ids(continuation: Any, tokenizer: Any, *, target: bool = False) -> list[int]:
    """Numbers of a continuation's tokens; of a text by itself, as a decoder is given it where ``target``."""
    if isinstance(continuation, str):
        if tokenizer is None:
            raise InputError("text needs the model's tokenizer: give processor= (AutoTokenizer), or numbers of tokens")
        if target:
            return [int(i) for i in tokenizer(text_target=continuation)["input_ids"]]
        return behind(tokenizer, continuation)
    try:
        rows = _rows(continuation)
    except (TypeError, ValueError) as error:
        raise InputError(f"a continuation is a text or numbers of tokens, not {continuation!r:.60}") from error
    if len(rows) != 1:
        raise InputError(f"{len(rows)} continuations for one prompt")
    return rows[0]


def _start(model: nn.Module) -> int:
    """The token that a decoder begins with."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        found = getattr(config, "decoder_start_token_id", None)
        if isinstance(found, int):
            return found
    raise InputError(
        "the model's config does not say which token its decoder begins with: set model.config.decoder_start_token_id"
    )


def _generator(model: nn.Module) -> Any:
    """Its own way to generate."""
    able = getattr(model, "can_generate", None)
    generate: Any = getattr(model, "generate", None)
    if not callable(generate) or (callable(able) and not able()):
        raise InputError(
            f"{type(model).__name__} cannot generate text: give a continuation if it is a language model; explain() "
            "takes any other"
        )
    return generate


def _generated(
    model: nn.Module,
    generate: Any,
    ids: list[int],
    count: int,
    decoder: bool,
    beside: Beside,
    streamer: Streamer | None,
) -> tuple[list[int], list[int]]:
    """(what a decoder began with, the likeliest tokens one after another)."""
    given = fitted(model, {"input_ids": torch.tensor([ids]), **beside.fed(len(ids))})
    config = getattr(model, "generation_config", None)
    padding = {} if getattr(config, "pad_token_id", None) is not None else {"pad_token_id": _pad(config)}
    streams = "streamer" in inspect.signature(generate).parameters and streamer is not None
    try:
        with torch.no_grad():
            made = generate(
                attention_mask=torch.ones_like(given["input_ids"]), max_new_tokens=count, do_sample=False, num_beams=1,
                return_dict_in_generate=False, **padding, **({"streamer": streamer} if streams else {}), **given,
            )  # fmt: skip
    finally:
        if streamer is not None:
            streamer.end()
    tokens: list[int] = made[0].tolist()
    return (tokens[:1], tokens[1:]) if decoder else ([], tokens[len(ids) :])


def _pad(config: Any) -> int:
    """What ends a text stands for padding too, of which there is none; so that no warning asks for it."""
    ends = getattr(config, "eos_token_id", None)
    return int(ends[0] if isinstance(ends, list) else ends or 0)


def _turns(prompt: Prompt, ids: list[int], answer: list[int], tokenizer: Any) -> tuple[list[Turn], set[int]]:
    """The messages by tokens, and which tokens the template writes around them.

    A token that begins inside of a message belongs to it; the answer is the last message.
    """
    if not prompt.turns or prompt.text is None or not getattr(tokenizer, "is_fast", False):
        return [], set()
    encoded = tokenizer(prompt.text, add_special_tokens=prompt.special, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"][: len(ids)]
    found: list[Turn] = []
    for role, begin, end in prompt.turns:
        inside = [i for i, (a, b) in enumerate(offsets) if begin <= a < end and a <= b]
        if inside:
            found.append((role, inside[0], inside[-1] + 1))
    written = {i for i, (a, b) in enumerate(offsets) if any(a < end and begin < b for begin, end in prompt.contents)}
    template = {i for i, (a, b) in enumerate(offsets) if a < b} - written
    return [*found, ("assistant", len(ids), len(ids) + len(answer))], template


def _special(ids: list[int], template: set[int], tokenizer: Any) -> list[int]:
    """Places of special tokens and of the template's; [UNK] and [MASK] stand for content."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    listed = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
    listed -= {getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "mask", "image", "video", "audio")}
    listed |= set(named_special(tokenizer))
    return [place for place, i in enumerate(ids) if i in listed or place in template]
