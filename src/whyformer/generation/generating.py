"""``explain_generation``: one forward pass over prompt and answer, then a backward pass for each generated token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor

from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, check_count
from whyformer.explaining import open_model
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.generation.pictures import has_pictures, with_images
from whyformer.generation.prompts import Completion, Prompt, complete, read_prompts
from whyformer.generation.steps import Steps, refuse_without_ids
from whyformer.generation.streamer import Streamer
from whyformer.methods import find
from whyformer.methods.settings import OptionsAndSettings
from whyformer.options import Keywords, shows_options, split
from whyformer.progress import Track, tracking
from whyformer.targets import Target


@shows_options
def explain_generation(
    model: Any,
    prompt: Any,
    continuation: Any = None,
    method: str = DEFAULT_METHOD,
    processor: Any = None,
    *,
    images: Any = None,
    max_new_tokens: int = 32,
    target: Target = None,
    progress: bool | Track = False,
    **options_and_settings: Unpack[OptionsAndSettings],
) -> Generation | list[Generation]:
    """Explain each token of an answer by the tokens before it, of the prompt and of the answer.

    This takes one forward pass over prompt and answer, and one backward pass per generated token. Methods whose passes
    cannot serve several targets (because they change the input, or run forward block by block) run once per token, and
    so do all methods if the logits of a token depend on the number of tokens after it (rotary frequencies that change
    with the length).

    Args:
        model: a language model or an encoder–decoder as :func:`whyformer.explain` takes it: a module in eval mode, a
            folder or a hub id.
        prompt: a text; a conversation ``[{"role": "user", "content": "..."}]``, which the chat template turns into
            text; token ids ``[N]`` or a mapping with ``input_ids``; or a list of texts, conversations or ids. The
            content of a message may be a list of parts, ``{"type": "text", "text": "..."}`` and ``{"type": "image"}``,
            the latter perhaps with the picture or its file as ``"image"``.
        continuation: the answer to explain, as text or token ids, or a list of one per prompt; by default the answer
            that the model's ``generate`` writes greedily. Other settings of ``model.generation_config``, such as
            ``repetition_penalty``, apply to the choice of its tokens, but not to the explained logits: ``g.notes``
            counts tokens that are not the likeliest by these.
        method: a name from :func:`whyformer.list_methods`; by default "auto": AttnLRP, summed over the first blocks
            if the model is a decoder with one text as input (``diagnostics[t]["auto"]`` names it).
        processor: the model's tokenizer, or its processor for pictures and text; loaded automatically if ``model`` is
            a name.
        images: the picture that the prompt is about (a PIL image or a file), or several; for a list of prompts, a list
            with one or several per prompt. ``g[t].part("pixel_values")`` is its map for each generated token.
        max_new_tokens: largest number of tokens to generate.
        target: the quantity of each token to explain: None or ``"log_probability"`` of the generated token;
            ``"logit"``; ``"probability"``; ``"among_likeliest"``, its log-probability among the 10 likeliest tokens;
            ``"contrast"``, its logit minus that of the best other token; or a target over one row of logits, the same
            for every step (``targets.Contrast(" is", " are")``).
        progress: as for :func:`whyformer.explain`. During generation ("writing"), each item is the text so far.
        **options_and_settings: options as for :func:`whyformer.explain`, and the method's settings. With
            ``checkpoint``, blocks are recomputed in the backward pass of each token, so a token costs about as much as
            a forward and a backward pass.

    Returns:
        A :class:`~whyformer.explanation.generation.Generation`; for a list of prompts, a list of them. Each equals that
        of a single run.

    Raises:
        InputError: the prompt is empty, has more tokens than the model takes or a token outside of its vocabulary, or
            the model is not a language model.
    """
    options, settings = split(options_and_settings)
    find(method).complete(settings)
    check_count("max_new_tokens", max_new_tokens)
    opened = open_model(model, processor, **options)
    model, tokenizer = opened.model, opened.tokenizer
    refuse_without_ids(model)
    if images is None and not has_pictures(prompt):
        prompts, single = read_prompts(prompt, tokenizer)
    else:
        encoded, single = with_images(model, prompt, images, opened.processor)
        prompts = [Prompt(ids, extra=extra) for ids, extra in encoded]
    answers = [continuation] if single else [None] * len(prompts) if continuation is None else continuation
    if not isinstance(answers, list | tuple | Tensor) or len(answers) != len(prompts):
        raise InputError(f"several prompts need a list of as many continuations ({len(prompts)}), not {answers!r:.60}")
    generations = []
    for parsed, answer in zip(prompts, answers, strict=True):
        quiet = progress is False or answer is not None
        streamer = None if quiet else Streamer(tracking(progress), tokenizer, max_new_tokens)
        completion = complete(model, parsed, answer, tokenizer, max_new_tokens, streamer)
        generations.append(Steps(opened, completion).explain(method, target, progress, settings))
    return generations[0] if single else generations


@shows_options
def explain_span(
    g: Generation,
    first: int,
    last: int,
    model: Any,
    processor: Any = None,
    *,
    prompt: Any = None,
    images: Any = None,
    **options: Unpack[Keywords],
) -> Explanation:
    """Explain the log-probability Σ log p(token t) of steps ``first`` to ``last`` (inclusive) of a generated text.

    This takes one forward and one backward pass of the method of ``g``. The result equals the sum of the rows of these
    steps for every method that is linear in its target (gradient × input, and all methods that propagate multipliers,
    such as ``attnlrp``).

    Args:
        g: the result of :func:`explain_generation`, possibly read from a file.
        first, last: steps, from 0; negative numbers count from the end.
        model, processor: the model and processor that generated the text, which ``g`` does not store.
        prompt, images: as for :func:`explain_generation`, if the prompt has pictures.
        **options: as for :func:`whyformer.explain`.

    Raises:
        InputError: a step does not exist, ``g`` was merged by ``g.by``, the prompt is not that of ``g``, or the logits
            of the first step depend on later tokens.
    """
    if g.unit != "token":
        raise InputError("a span consists of tokens: call explain_span before by()")
    for number in (first, last):
        if not -len(g) <= number < len(g):
            raise InputError(f"step {number} is outside the text, which has {len(g)}: 0 to {len(g) - 1}")
    a, b = first % len(g), last % len(g)
    if b < a:
        raise InputError(f"the span ends at step {last}, before its start at {first}")
    opened = open_model(model, processor, **options)
    begin = g.ids[g.source : g.start] if g.source else []
    completion = Completion(g.ids[: g.source or g.start], g.ids[g.start :], begin)
    if g.picture_maps:
        if prompt is None or (images is None and not has_pictures(prompt)):
            raise InputError("the prompt has pictures, which are not stored: pass prompt= and images= again")
        ((ids, extra),), _ = with_images(opened.model, prompt, images, opened.processor)
        if ids != completion.prompt:
            raise InputError("this answer was generated from another prompt or other pictures")
        completion = replace(completion, extra=extra)
    return Steps(opened, completion).span(a, b, g.method, g.settings)
