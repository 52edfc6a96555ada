"""The HTTP interface: a text or a picture in, its explanation as JSON or PNG out. Described in ``/openapi.json``."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

import whyformer
from whyformer.apps.http import LOCAL, RequestChecks
from whyformer.apps.server.batching import Batcher, PendingRequest
from whyformer.apps.server.limits import Limits
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, TooLarge, WhyformerError
from whyformer.explanation.result import Explanation
from whyformer.explanation.storage import plain
from whyformer.inputs.pictures import open_picture
from whyformer.inputs.texts import BETWEEN
from whyformer.jobs.batching import Session
from whyformer.jobs.rows import PAIR
from whyformer.methods import METHODS, find
from whyformer.show import encode, figure
from whyformer.show.files import record_of

Format = Annotated[Literal["json", "png"], Query()]
Responses = dict[int | str, dict[str, Any]]


class Reason(BaseModel):
    """The reason why a request was refused, and what to do instead."""

    detail: Any


REFUSALS: Responses = {code: {"model": Reason} for code in (400, 401, 403, 408, 413, 422, 429, 503, 504)}
ANSWERS: Responses = {
    200: {
        "description": "The explanation: the output of `whyformer explain --json`, or a picture.",
        "content": {"application/json": {"schema": {"type": "object"}}, "image/png": {}},
    }
}
PICTURE_BODY = {
    "requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
}


class TextRequest(BaseModel):
    """A text and the options of its explanation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str = Field(min_length=1, description="The sentence to explain.")
    text_pair: str | None = Field(
        None, min_length=1, description="The second text, for a model that reads pairs of texts."
    )
    method: str = Field(DEFAULT_METHOD, description="Name of a method, see GET /v1/methods.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the method that differ from the defaults."
    )
    target: int | str | None = Field(
        None,
        description="Index or name of a class, or a target such as \"Token(1, 'PER')\"; default: the predicted class.",
    )


class Service:
    """The model, the limits, the queue and the metrics behind the routes."""

    def __init__(self, session: Session, modality: str, limits: Limits) -> None:
        self.session, self.modality, self.limits = session, modality, limits
        self.drawing = asyncio.Lock()  # matplotlib draws one figure at a time
        self.registry = CollectorRegistry()
        self.requests = Counter("whyformer_requests", "requests by status", ["status"], registry=self.registry)
        self.seconds = Histogram("whyformer_seconds", "from arrival to explanation", registry=self.registry)
        sizes = (1, 2, 4, 8, 16, 32, 64)
        batch = Histogram("whyformer_batch", "requests explained together", registry=self.registry, buckets=sizes)
        self.batcher = Batcher(session, limits, batch.observe)
        waiting = Gauge("whyformer_waiting", "requests that wait", registry=self.registry)
        waiting.set_function(lambda: len(self.batcher.waiting))

    def count(self, status: int) -> None:
        """Count a response."""
        self.requests.labels(str(status)).inc()

    def check(self, pending: PendingRequest) -> None:
        """Check that the model and the method accept a request."""
        if (kind := "text" if isinstance(pending.content, str | dict) else "image") != self.modality:
            raise InputError(f"{self.session.name} reads {self.modality}, and this is {kind}")
        if isinstance(pending.target, str) and (count := len(pending.target)) > self.limits.characters:
            raise TooLarge(f"the target has {count} characters; the limit is {self.limits.characters}")
        method = find(pending.method)
        for name, value in method.complete(pending.settings).items():
            default = method.settings[name]
            most = max(self.limits.setting, default) if isinstance(default, int | float) else self.limits.setting
            if isinstance(value, int | float) and abs(value) > most:
                raise InputError(f"{name} must be at most {most} on this server")
        if pending.target is not None:
            self.session.check_target(pending.target)

    async def explain(self, request: Request, pending: PendingRequest) -> Explanation:
        """Return the explanation, or raise the status of a refusal; cancel it if the client disconnects."""
        answer = self.batcher.submit(pending)
        gone = asyncio.ensure_future(request.receive())  # the body has been read, so this is the disconnection
        try:
            with self.seconds.time():
                done, _ = await asyncio.wait(
                    [answer, gone], timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED
                )
            if answer in done:
                return answer.result()
            if gone in done:
                raise HTTPException(499, "the client is gone")
            raise HTTPException(504, f"no response within {self.limits.seconds:g} seconds: use a faster method")
        finally:
            answer.cancel()  # nobody waits for it any more
            gone.cancel()

    async def respond(self, request: Request, pending: PendingRequest, title: str, form: str) -> Response:
        """Return the explanation as JSON, or as a PNG picture."""
        self.check(pending)
        e = await self.explain(request, pending)
        if form == "json":
            return await run_in_threadpool(
                lambda: JSONResponse(plain(record_of("explain", [e], self.session.name, title), finite=True))
            )
        async with self.drawing:
            return Response(await run_in_threadpool(lambda: encode(figure(e), "png")), media_type="image/png")


def get_service(request: Request) -> Service:
    """Return the service of the application that received the request."""
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(get_service)]
router = APIRouter()


@router.post("/v1/explain/text", responses=ANSWERS)
async def explain_text(request: Request, service: Served, body: TextRequest, format: Format = "json") -> Response:  # noqa: A002
    """Explain a text."""
    if (count := len(body.text) + len(body.text_pair or "")) > (most := service.limits.characters):
        raise TooLarge(f"the text has {count} characters; the limit is {most}")
    content = body.text if body.text_pair is None else {"text": body.text, PAIR: body.text_pair}
    title = " ".join(BETWEEN.join(filter(None, (body.text, body.text_pair))).split())[:100]
    pending = PendingRequest(content, body.method, body.settings, body.target)
    return await service.respond(request, pending, title, format)


@router.post("/v1/explain/picture", responses=ANSWERS, openapi_extra=PICTURE_BODY)
async def explain_picture(
    request: Request,
    service: Served,
    method: str = DEFAULT_METHOD,
    target: Annotated[str | None, Query(description="As for a text, such as 3 or \"Query(0, 'cat')\".")] = None,
    settings: Annotated[
        str, Query(description="Settings of the method that differ from the defaults, as a JSON object.")
    ] = "{}",
    format: Format = "json",  # noqa: A002
) -> Response:
    """Explain a picture, which is the body."""
    try:
        values = TypeAdapter(dict[str, Any]).validate_json(settings)
    except ValidationError as error:
        raise HTTPException(422, "settings must be a JSON object, such as {\"start_layer\": 1}") from error
    file, limits = io.BytesIO(await request.body()), service.limits
    try:
        picture = await run_in_threadpool(lambda: open_picture(file, pixels=limits.pixels, size=limits.size))
    except InputError as error:
        raise TooLarge(str(error)) from error
    return await service.respond(request, PendingRequest(picture, method, values, target), "picture", format)


@router.get("/v1/methods")
async def list_methods(service: Served) -> list[dict[str, Any]]:
    """List the methods for the model's kind of input, with their settings and defaults."""
    methods = [method for _, method in sorted(METHODS.items()) if method.modality in ("both", service.modality)]
    return [{"name": m.name, "summary": m.summary, "settings": plain(m.settings, finite=True)} for m in methods]


@router.get("/health")
async def health() -> dict[str, str]:
    """Report that the process is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(service: Served) -> dict[str, Any]:
    """Report that requests are accepted, and how many are waiting."""
    if not service.batcher.ready:
        raise HTTPException(503, "the server accepts no requests")
    return {"status": "ready", "model": service.session.name, "waiting": len(service.batcher.waiting)}


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
async def metrics(service: Served) -> Response:
    """Return metrics for Prometheus."""
    return Response(generate_latest(service.registry), media_type="text/plain; version=0.0.4")


async def refuse(request: Request, error: Exception) -> Response:
    """Return the reason in ASCII: it may repeat what the client sent, and half of a surrogate pair has no UTF-8."""
    if isinstance(error, RequestValidationError):  # without the client's values, which need not be JSON
        keys = ("type", "loc", "msg")
        detail: Any = [{key: plain(item[key], finite=True) for key in keys} for item in error.errors()]
        error = HTTPException(422, detail)
    elif isinstance(error, WhyformerError):
        error = HTTPException(413 if isinstance(error, TooLarge) else 400, str(error))
    assert isinstance(error, HTTPException)
    reason = json.dumps({"detail": error.detail})
    return Response(reason, error.status_code, error.headers, media_type="application/json")


def build(
    session: Session,
    modality: str,
    limits: Limits,
    keys: tuple[str, ...] = (),
    hosts: Collection[str] = LOCAL,
    started: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application. Its :class:`~whyformer.apps.server.batching.Batcher` ends with it.

    Args:
        session: the model.
        modality: "text" or "image", what the model reads; a request of the other kind is refused with 400.
        limits: limits of requests.
        keys: see :class:`~whyformer.apps.http.RequestChecks`; no key is required if empty.
        hosts: names of this server. Without a key, a request is refused if its ``Host`` is none of them, because the
            name of another site may resolve to the address of this machine.
        started: called once requests are accepted.
    """
    service = Service(session, modality, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(service.batcher.run())
        started()
        try:
            yield
        finally:
            service.batcher.close()
            # no request is left; a step that runs for requests that the server cancelled is not waited for
            await asyncio.wait([worker], timeout=1.0)

    app = FastAPI(
        title="whyformer",
        version=whyformer.__version__,
        description=f"Explains what {session.name} says.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=REFUSALS,
        exception_handlers=dict.fromkeys((RequestValidationError, HTTPException, WhyformerError), refuse),
    )
    app.state.service = service
    app.include_router(router)
    if not keys:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    # added last, so it comes first
    app.add_middleware(RequestChecks, size=limits.size, seconds=limits.seconds, keys=keys, count=service.count)
    return app
