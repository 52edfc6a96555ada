"""The HTTP interface: a text or a picture in, its explanation as JSON or PNG out. Described in ``/openapi.json``."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteException
from starlette.middleware.trustedhost import TrustedHostMiddleware

import whyformer
from whyformer.apps.http import LOCAL
from whyformer.apps.server.batches import Asked, Batcher, Full, Refused, TimeIsUp
from whyformer.apps.server.gate import Gate, Outcomes
from whyformer.apps.server.limits import Limits
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, WhyformerError
from whyformer.inputs.pictures import open_picture
from whyformer.jobs.batching import Session
from whyformer.jobs.records import plain
from whyformer.methods import METHODS, find
from whyformer.models.structure import class_count, class_names
from whyformer.show import encode, figure
from whyformer.show.files import record_of
from whyformer.targets import class_index

Form = Literal["json", "png"]
Responses = dict[int | str, dict[str, Any]]
_WHY = {
    400: "The input, the method, a setting or the target is wrong; the reason says what to do.",
    401: "A key is asked for.",
    403: "A page of another site made the request.",
    408: "The request took too long to arrive.",
    413: "The body, the picture or the text is too large, or its explanation would take too much memory.",
    422: "The body is not of this form.",
    429: "Too many requests wait, or the server is about to end; try again later.",
    503: "The server is about to end, or has too many connections.",
    504: "The explanation would take too long.",
}


class Reason(BaseModel):
    """Why a request was refused."""

    detail: Any


class TextRequest(BaseModel):
    """A text and what is asked of it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str = Field(min_length=1, description="The sentence to explain.")
    method: str = Field(DEFAULT_METHOD, description="A name of GET /v1/methods.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Of the method, where not the defaults.")
    target: int | str | None = Field(None, description="A class, by number or name; the predicted one by default.")


def build(
    session: Session,
    modality: str,
    limits: Limits,
    keys: tuple[str, ...] = (),
    hosts: Collection[str] = LOCAL,
    started: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The application; its :class:`~whyformer.apps.server.batches.Batcher` begins and ends with it.

    Args:
        modality: "text" or "image", what the model reads; a request of the other kind is refused with 400.
        keys: see :class:`~whyformer.apps.server.gate.Gate`. started: called once requests are taken.
        hosts: where there is no key, names of this server, one of which a request has to call it by: a page of the web
            may give its own name the address of this machine.
    """
    figures, drawing = Figures(), asyncio.Lock()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = Batcher(
            session, limits.batch, limits.wait, limits.queue, figures.batch.observe
        )
        figures.waiting.set_function(lambda: len(app.state.batcher.waiting))
        started()
        try:
            yield
        finally:
            # no request is left; a step that runs for those that the server cancelled is not waited for
            await run_in_threadpool(app.state.batcher.close, 1.0)

    app = FastAPI(
        title="whyformer", version=whyformer.__version__, lifespan=life, docs_url=None, redoc_url=None,
        description=f"Explains what {session.name} says.",
    )  # fmt: skip
    # the last one comes first
    app.add_middleware(Gate, keys=keys, size=limits.size, seconds=limits.seconds)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=["*"] if keys else [*hosts], www_redirect=False)
    app.add_middleware(Outcomes, count=lambda status: figures.requests.labels(str(status)).inc())
    said = "The explanation, as `whyformer explain --json` prints it, or a picture of it."
    kinds: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}, "image/png": {}}
    refusals: Responses = {code: {"model": Reason, "description": why} for code, why in _WHY.items()}
    answers: Responses = {200: {"description": said, "content": kinds}}

    async def answer(
        content: Any, method: str, settings: dict[str, Any], target: Any, form: Form, title: str
    ) -> Response:
        begun = time.monotonic()
        if (kind := "text" if isinstance(content, str) else "image") != modality:
            raise HTTPException(400, f"{session.name} reads {modality}, and this is {kind}")
        try:
            full = find(method).complete(settings)
            large = [k for k, v in full.items() if isinstance(v, int | float) and abs(v) > limits.setting]
            if large:
                raise InputError(f"{large[0]} may be at most {limits.setting} here")
            if target is not None:
                class_index(target, class_names(session.model)[0], class_count(session.model))
        except WhyformerError as error:
            raise HTTPException(400, str(error)) from error
        asked = Asked(content, method, settings, target, begun + limits.seconds)
        try:
            waiting = asyncio.wrap_future(app.state.batcher.submit(asked))
            e = await asyncio.wait_for(waiting, limits.seconds)
        except Full:
            raise HTTPException(429, f"{limits.queue} requests wait; try again later", {"Retry-After": "1"}) from None
        except (TimeoutError, TimeIsUp):
            raise HTTPException(504, f"no answer within {limits.seconds:g} seconds; ask for less") from None
        except Refused as error:
            raise HTTPException(413 if error.large else 400, str(error)) from None
        finally:
            figures.seconds.observe(time.monotonic() - begun)
        if form == "json":
            return await run_in_threadpool(lambda: JSONResponse(plain(record_of("explain", [e], session.name, title))))
        async with drawing:  # matplotlib draws one figure at a time
            return Response(await run_in_threadpool(lambda: encode(figure(e), "png")), media_type="image/png")

    @app.post("/v1/explain/text", responses={**answers, **refusals})
    async def explain_text(asked: TextRequest, format: Annotated[Form, Query()] = "json") -> Response:  # noqa: A002
        """Explain a text."""
        if len(asked.text) > limits.characters:
            raise HTTPException(413, f"the text has {len(asked.text)} characters, and {limits.characters} are taken")
        title = " ".join(asked.text.split())[:100]
        return await answer(asked.text, asked.method, asked.settings, asked.target, format, title)

    body = {
        "requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
    }

    @app.post("/v1/explain/picture", responses={**answers, **refusals}, openapi_extra=body)
    async def explain_picture(
        request: Request, method: str = DEFAULT_METHOD, target: str | None = None,
        format: Annotated[Form, Query()] = "json",  # noqa: A002
    ) -> Response:  # fmt: skip
        """Explain a picture, which is the body."""
        raw = await request.body()
        try:
            read = lambda: open_picture(io.BytesIO(raw), pixels=limits.pixels, size=limits.size)  # noqa: E731
            picture = await run_in_threadpool(read)
        except InputError as error:
            raise HTTPException(413, str(error)) from error
        except WhyformerError as error:
            raise HTTPException(400, str(error)) from error
        number = int(target) if target is not None and target.isascii() and target.isdigit() else target
        return await answer(picture, method, {}, number, format, "picture")

    @app.get("/v1/methods", responses={401: refusals[401]})
    async def list_methods() -> list[dict[str, Any]]:
        """The methods for what the model reads, and their settings with the defaults."""
        known = [METHODS[name] for name in sorted(METHODS)]
        fitting = [m for m in known if m.modality in ("both", modality)]
        return [{"name": m.name, "summary": m.summary, "settings": plain(m.settings)} for m in fitting]

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": Reason, "description": "It takes no requests (any more)."}})
    async def ready() -> dict[str, Any]:
        """Whether it takes requests, and how many wait."""
        batcher = app.state.batcher
        if not batcher.open or batcher.full:
            raise HTTPException(503, "no requests are taken now")
        return {"status": "ready", "model": session.name, "waiting": len(batcher.waiting)}

    @app.get("/metrics", responses={401: refusals[401], 200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(generate_latest(figures.registry), media_type="text/plain; version=0.0.4")

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        # without what was sent, which need not be JSON
        told = [{key: plain(one[key]) for key in ("type", "loc", "msg")} for one in error.errors()]
        return Escaped({"detail": told}, 422)

    @app.exception_handler(StarletteException)
    async def refused(request: Request, error: StarletteException) -> JSONResponse:
        return Escaped({"detail": error.detail}, error.status_code, getattr(error, "headers", None))

    return app


class Escaped(JSONResponse):  # type: ignore[misc]
    """JSON in ASCII: a reason may repeat what was sent, and half of a surrogate pair has no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Figures:
    """What Prometheus is told."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("whyformer_requests", "requests by status", ["status"], registry=self.registry)
        self.waiting = Gauge("whyformer_waiting", "requests that wait", registry=self.registry)
        self.seconds = Histogram("whyformer_seconds", "from arrival to explanation", registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.batch = Histogram("whyformer_batch", "requests explained together", registry=self.registry, buckets=sizes)
