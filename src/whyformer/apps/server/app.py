"""The HTTP interface: a text or a picture in, its explanation as JSON or PNG out. Described in ``/openapi.json``."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException as StarletteException
from starlette.middleware.trustedhost import TrustedHostMiddleware

import whyformer
from whyformer.apps.http import LOCAL, SecurityMiddleware
from whyformer.apps.server.auth import CountStatus, RequireKey
from whyformer.apps.server.batching import Batcher, DeadlineExceeded, PendingRequest, QueueFull, RequestError
from whyformer.apps.server.limits import Limits
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, WhyformerError
from whyformer.explanation.result import Explanation
from whyformer.inputs.pictures import open_picture
from whyformer.jobs.batching import Session
from whyformer.jobs.records import plain
from whyformer.methods import METHODS, find
from whyformer.models.structure import class_count, class_names
from whyformer.show import encode, figure
from whyformer.show.files import record_of
from whyformer.targets import class_index

Format = Annotated[Literal["json", "png"], Query()]
Responses = dict[int | str, dict[str, Any]]
DISCONNECT_CHECK = 0.05
"""Seconds between looks whether the client of a waiting request is still there."""


class Reason(BaseModel):
    """Why a request was refused."""

    detail: Any


REFUSALS: Responses = {
    code: {"model": Reason, "description": why}
    for code, why in {
        400: "The input, the method, a setting or the target is wrong; the reason says what to do.",
        401: "A key is asked for.",
        403: "A page of another site made the request.",
        408: "The request took too long to arrive.",
        413: "The body, the picture or the text is too large, or its explanation would take too much memory.",
        422: "The body is not of this form.",
        429: "Too many requests wait, or the server is about to end; try again later.",
        503: "The server is about to end, or has too many connections.",
        504: "The explanation would take too long.",
    }.items()
}
ANSWERS: Responses = REFUSALS | {
    200: {
        "description": "The explanation, as `whyformer explain --json` prints it, or a picture of it.",
        "content": {"application/json": {"schema": {"type": "object"}}, "image/png": {}},
    }
}
PICTURE_BODY = {
    "requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
}


class TextRequest(BaseModel):
    """A text and what is asked of it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str = Field(min_length=1, description="The sentence to explain.")
    method: str = Field(DEFAULT_METHOD, description="A name of GET /v1/methods.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Of the method, where not the defaults.")
    target: int | str | None = Field(None, description="A class, by number or name; the predicted one by default.")


class Service:
    """The model, the limits, the queue and the metrics behind the routes."""

    def __init__(self, session: Session, modality: str, limits: Limits) -> None:
        self.session, self.modality, self.limits = session, modality, limits
        self.drawing = asyncio.Lock()  # matplotlib draws one figure at a time
        self.registry = CollectorRegistry()
        self.requests = Counter("whyformer_requests", "requests by status", ["status"], registry=self.registry)
        self.seconds = Histogram("whyformer_seconds", "from arrival to explanation", registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64)
        self.batch = Histogram("whyformer_batch", "requests explained together", registry=self.registry, buckets=sizes)
        self.waiting = Gauge("whyformer_waiting", "requests that wait", registry=self.registry)

    def open(self) -> None:
        """Start the thread that explains."""
        self.batcher = Batcher(self.session, self.limits.batch, self.limits.wait, self.limits.queue, self.batch.observe)
        self.waiting.set_function(lambda: len(self.batcher.waiting))

    def check(self, content: Any, method: str, settings: dict[str, Any], target: Any) -> None:
        """Raise 400 for what the model or the method does not take."""
        if (kind := "text" if isinstance(content, str) else "image") != self.modality:
            raise HTTPException(400, f"{self.session.name} reads {self.modality}, and this is {kind}")
        try:
            full = find(method).complete(settings)
            large = [k for k, v in full.items() if isinstance(v, int | float) and abs(v) > self.limits.setting]
            if large:
                raise InputError(f"{large[0]} may be at most {self.limits.setting} here")
            if target is not None:
                model = self.session.model
                class_index(target, class_names(model)[0], class_count(model))
        except WhyformerError as error:
            raise HTTPException(400, str(error)) from error

    async def explain(self, request: Request, asked: PendingRequest) -> Explanation:
        """The explanation, or the status of why there is none; cancelled once the client is gone."""
        seconds, begun = self.limits.seconds, time.monotonic()
        try:
            answer = asyncio.wrap_future(self.batcher.submit(asked))
            while not (await asyncio.wait([answer], timeout=DISCONNECT_CHECK))[0]:
                if time.monotonic() > asked.deadline:
                    raise DeadlineExceeded
                if await request.is_disconnected():
                    raise HTTPException(499, "the client is gone")
            return answer.result()
        except QueueFull:
            wait = {"Retry-After": "1"}
            raise HTTPException(429, f"{self.limits.queue} requests wait; try again later", wait) from None
        except DeadlineExceeded:
            raise HTTPException(504, f"no answer within {seconds:g} seconds; ask for less") from None
        except RequestError as error:
            raise HTTPException(413 if error.large else 400, str(error)) from None
        finally:
            asked.answer.cancel()  # nobody waits for it any more
            self.seconds.observe(time.monotonic() - begun)

    async def respond(self, request: Request, asked: PendingRequest, form: str, title: str) -> Response:
        """The explanation as JSON, or as a PNG picture."""
        self.check(asked.content, asked.method, asked.settings, asked.target)
        e = await self.explain(request, asked)
        if form == "json":
            name = self.session.name
            return await run_in_threadpool(lambda: JSONResponse(plain(record_of("explain", [e], name, title))))
        async with self.drawing:
            return Response(await run_in_threadpool(lambda: encode(figure(e), "png")), media_type="image/png")


def get_service(request: Request) -> Service:
    """The service of the application that the request came to."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(get_service)]
router = APIRouter()


@router.post("/v1/explain/text", responses=ANSWERS)
async def explain_text(request: Request, service: Served, asked: TextRequest, format: Format = "json") -> Response:  # noqa: A002
    """Explain a text."""
    limits = service.limits
    if len(asked.text) > limits.characters:
        raise HTTPException(413, f"the text has {len(asked.text)} characters, and {limits.characters} are taken")
    until = time.monotonic() + limits.seconds
    pending = PendingRequest(asked.text, asked.method, asked.settings, asked.target, until)
    return await service.respond(request, pending, format, " ".join(asked.text.split())[:100])


@router.post("/v1/explain/picture", responses=ANSWERS, openapi_extra=PICTURE_BODY)
async def explain_picture(
    request: Request,
    service: Served,
    method: str = DEFAULT_METHOD,
    target: str | None = None,
    settings: Annotated[str, Query(description="Of the method, where not the defaults: a JSON object.")] = "{}",
    format: Format = "json",  # noqa: A002
) -> Response:
    """Explain a picture, which is the body."""
    try:
        given = TypeAdapter(dict[str, Any]).validate_json(settings)
    except ValidationError as error:
        raise HTTPException(422, "settings is a JSON object, such as {\"start_layer\": 1}") from error
    limits, until = service.limits, time.monotonic() + service.limits.seconds
    raw = io.BytesIO(await request.body())
    try:
        picture = await run_in_threadpool(lambda: open_picture(raw, pixels=limits.pixels, size=limits.size))
    except InputError as error:
        raise HTTPException(413, str(error)) from error
    except WhyformerError as error:
        raise HTTPException(400, str(error)) from error
    number = int(target) if target is not None and target.isascii() and target.isdigit() else target
    return await service.respond(request, PendingRequest(picture, method, given, number, until), format, "picture")


@router.get("/v1/methods", responses={401: REFUSALS[401]})
async def list_methods(service: Served) -> list[dict[str, Any]]:
    """The methods for what the model reads, and their settings with the defaults."""
    fitting = [METHODS[name] for name in sorted(METHODS) if METHODS[name].modality in ("both", service.modality)]
    return [{"name": m.name, "summary": m.summary, "settings": plain(m.settings)} for m in fitting]


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether the process lives."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"model": Reason, "description": "It takes no requests (any more)."}})
async def ready(service: Served) -> dict[str, Any]:
    """Whether it takes requests, and how many wait."""
    batcher = service.batcher
    if not batcher.open or batcher.full:
        raise HTTPException(503, "no requests are taken now")
    return {"status": "ready", "model": service.session.name, "waiting": len(batcher.waiting)}


@router.get("/metrics", responses={401: REFUSALS[401], 200: {"content": {"text/plain": {}}}}, response_class=Response)
async def metrics(service: Served) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(service.registry), media_type="text/plain; version=0.0.4")


async def refuse(request: Request, error: Exception) -> Response:
    """The reason in ASCII: it may repeat what was sent, and half of a surrogate pair has no UTF-8."""
    if isinstance(error, RequestValidationError):  # without what was sent, which need not be JSON
        status, reason = 422, [{key: plain(one[key]) for key in ("type", "loc", "msg")} for one in error.errors()]
    else:
        assert isinstance(error, StarletteException)
        status, reason = error.status_code, error.detail
    headers = getattr(error, "headers", None)
    return Response(json.dumps({"detail": reason}), status, headers, media_type="application/json")


def build(
    session: Session,
    modality: str,
    limits: Limits,
    keys: tuple[str, ...] = (),
    hosts: Collection[str] = LOCAL,
    started: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The application; its :class:`~whyformer.apps.server.batching.Batcher` begins and ends with it.

    Args:
        modality: "text" or "image", what the model reads; a request of the other kind is refused with 400.
        keys: see :class:`~whyformer.apps.server.auth.RequireKey`; none is asked for if there is none.
        hosts: where there is no key, names of this server, one of which a request has to call it by: a page of the web
            may give its own name the address of this machine.
        started: called once requests are taken.
    """
    service = Service(session, modality, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.open()
        started()
        try:
            yield
        finally:
            # no request is left; a step that runs for those that the server cancelled is not waited for
            await run_in_threadpool(service.batcher.close, 1.0)

    app = FastAPI(
        title="whyformer",
        version=whyformer.__version__,
        description=f"Explains what {session.name} says.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers={RequestValidationError: refuse, StarletteException: refuse},
    )
    app.state.service = service
    app.include_router(router)
    # the last one added comes first
    app.add_middleware(SecurityMiddleware, size=limits.size, seconds=limits.seconds)
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    else:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    app.add_middleware(CountStatus, count=lambda status: service.requests.labels(str(status)).inc())
    return app
