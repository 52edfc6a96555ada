"""``explain_generation``: one forward pass over prompt and answer, then a backward pass for each generated token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError
from whyformer.explaining import OpenedModel, open_model
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.generation.pictures import with_images
from whyformer.generation.prompts import Prompt, Written, answered, prompts_of
from whyformer.generation.steps import Steps
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
    """Explain each token of an answer: which tokens before it, of the prompt and of the answer itself, made it so.

    One forward pass over prompt and answer, and one backward pass for each generated token. Methods whose passes cannot
    serve several targets (those that change the input or run from it block by block) explain each token by itself.

    Args:
        model: a language model or an encoder–decoder as :func:`whyformer.explain` takes it: a module in eval mode, a
            folder or a hub id.
        prompt: a text; a conversation ``[{"role": "user", "content": "..."}]``, which the tokenizer's chat template
            writes down; numbers of tokens ``[N]`` or a mapping with ``input_ids``; or a list of texts, conversations or
            ids.
        continuation: the answer to explain, text or numbers of tokens (or one a prompt); by default what the model
            generates, the likeliest token each time.
        method: a name from :func:`whyformer.list_methods`; by default "auto": AttnLRP, summed over the first blocks
            where the model is a decoder of one text (``diagnostics[t]["auto"]`` names it).
        processor: the model's tokenizer, or its processor of pictures and words; found by itself when ``model`` is a
            name.
        images: the picture that the prompt is about (a PIL image or a file), or several; for a list of prompts, a list
            of one or several each. ``g[t].part("pixel_values")`` is then a map over it for each generated token.
        max_new_tokens: how many tokens to generate at most.
        target: what of each token is explained: None or ``"log_probability"`` of the generated token; ``"logit"``,
            ``"probability"``; ``"among_likeliest"``, its log-probability where one of the 10 likeliest tokens is drawn;
            ``"contrast"``, its logit minus that of the best other token; or a target over one row of logits, the same
            for every step (``targets.Contrast(" is", " are")``).
        progress: as for :func:`whyformer.explain`; while the model writes, "writing", each item is the text so far.
        **options_and_settings: options as for :func:`whyformer.explain`, and the method's settings. With
            ``checkpoint`` blocks are run again in the backward pass of each token, so that a token costs about as much
            as a forward and a backward pass.

    Returns:
        A :class:`~whyformer.explanation.generation.Generation`; a list of them for a list of prompts, each as by
        itself.

    Raises:
        InputError: an empty prompt, more tokens than the model takes, a token outside of its vocabulary, or a model
            that is no language model.
    """
    options, settings = split(options_and_settings)
    find(method).complete(settings)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}")
    opened = open_model(model, processor, **options)
    opened, processor = _with_tokenizer(opened), opened.processor
    model, tokenizer = opened.model, opened.processor
    if images is None:
        prompts, alone = prompts_of(prompt, tokenizer)
    else:
        seen, alone = with_images(model, prompt, images, processor)
        prompts = [Prompt(ids, beside=beside) for ids, beside in seen]
    answers = [continuation] if alone else [None] * len(prompts) if continuation is None else list(continuation)
    if len(answers) != len(prompts):
        raise InputError(f"{len(answers)} continuations for {len(prompts)} prompts: give one a prompt")
    made = []
    for one, answer in zip(prompts, answers, strict=True):
        quiet = progress is False or answer is not None
        streamer = None if quiet else Streamer(tracking(progress), tokenizer, max_new_tokens)
        written = answered(model, one, answer, tokenizer, max_new_tokens, streamer)
        made.append(Steps(opened, written).explain(method, target, progress, settings))
    return made[0] if alone else made


@shows_options
def explain_span(
    g: Generation,
    first: int,
    last: int,
    model: Any,
    processor: Any = None,
    *,
    prompt: str | None = None,
    images: Any = None,
    **options: Unpack[Keywords],
) -> Explanation:
    """Explain the log-probability of some steps of a generated text together, ``last`` included: Σ log p(token t).

    One forward and one backward pass, by the method of ``g``. It is the sum of these steps' rows for every method that
    is linear in its target (gradient × input, all that carry multipliers, so ``attnlrp`` too).

    Args:
        g: what :func:`explain_generation` returned, also read from a file.
        model, processor: those that wrote the text; a result does not hold them.
        prompt, images: as they were given to :func:`explain_generation`, where the prompt has pictures.
        **options: as for :func:`whyformer.explain`.

    Raises:
        InputError: there are no such steps, they were merged by ``g.by``, or the prompt is another one.
    """
    if g.unit != "token":
        raise InputError("a span is of the tokens, not of what by() made of them")
    for number in (first, last):
        if not -len(g) <= number < len(g):
            raise InputError(f"step {number} is outside the text, which has {len(g)}: 0 to {len(g) - 1}")
    a, b = first % len(g), last % len(g)
    if b < a:
        raise InputError(f"the span ends at step {last}, before its start at {first}")
    opened = open_model(model, processor, **options)
    written = Written(g.ids[: g.source or g.start], g.ids[g.start :], g.ids[g.source : g.start] if g.source else [])
    if g.seen:
        if prompt is None or images is None:
            raise InputError("its prompt has pictures, which are not kept with it: give prompt= and images= again")
        ((ids, beside),), _ = with_images(opened.model, prompt, images, opened.processor)
        if ids != written.prompt:
            raise InputError("these are not the prompt and the pictures that this answer was written to")
        written = replace(written, beside=beside)
    return Steps(_with_tokenizer(opened), written).span(a, b, g.method, g.settings)


def _with_tokenizer(opened: OpenedModel) -> OpenedModel:
    """With the tokenizer that its processor is or holds in the place of it; None where there is none."""
    tokenizer = getattr(opened.processor, "tokenizer", opened.processor)
    made = opened.using()
    made.processor = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None
    return made
