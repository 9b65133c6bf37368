"""The routes. What they do is elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from msgspec import Struct
from quart import Quart, Response, g, request
from werkzeug.exceptions import HTTPException

from homing.errors import HomingError, InternalError
from homing.frontend.access import Access, AccessSettings
from homing.frontend.chat import prepare_chat
from homing.frontend.completions import prepare_completion, prepare_generate, prepare_tokens
from homing.frontend.connection import MAX_BODY_BYTES, Connection
from homing.frontend.control_routes import control_routes
from homing.frontend.http_errors import error_body, headers_of, http_error_body, status_of
from homing.frontend.job import Call, Job
from homing.frontend.measures import Stopwatch
from homing.frontend.metrics import CONTENT_TYPE, render_metrics
from homing.frontend.openai.reply import Reply
from homing.frontend.openai.sampling import MAX_REQUEST_ID_CHARACTERS
from homing.frontend.openapi import openapi
from homing.frontend.page import page_routes
from homing.frontend.service import ServedModel, Service
from homing.frontend.status import (
    Version,
    generate_for_health,
    health,
    load,
    model_entry,
    model_list,
    server_info,
)
from homing.frontend.stream import answer, encode_json, json_bytes, json_response
from homing.frontend.token_routes import detokenize, tokenize

Prepare = Callable[[bytes, ServedModel, Call], tuple[Job, Reply]]


class App(Quart):
    def ensure_async(self, func: Callable[..., Any]) -> Callable[..., Any]:
        return func  # all of ours are: to look took a twentieth of a request's time


def create_app(service: Service, settings: AccessSettings | None = None) -> App:
    """The application over one service."""
    app = App("homing.frontend", static_folder=None)
    app.asgi_http_class = Connection
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    access = Access(settings or AccessSettings())
    app.url_map.strict_slashes = False  # clients that add a slash do not follow a redirected POST
    app.url_map.merge_slashes = False
    _add_generating_routes(app, service)
    _add_token_routes(app, service)
    _add_model_routes(app, service)
    _add_status_routes(app, service)
    app.register_blueprint(control_routes(service, access))
    _add_error_handlers(app)

    @app.before_request
    async def check() -> Response | None:
        g.request_id = _request_id()
        if answer := access.preflight():
            return answer
        g.tenant = access.check_user()
        return None

    @app.after_request
    async def mark(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        access.mark(response)
        return response

    return app


def _add_generating_routes(app: Quart, service: Service) -> None:
    def generating(prepare: Prepare, *paths: str) -> None:
        async def post() -> Response:
            model = await service.joined_model()
            call = _call(service, model)
            body = await _body()
            job, reply = await model.prepare(body, partial(prepare, body, model, call))
            return await answer(job, reply, call)

        for path in paths:
            app.add_url_rule(path, path, post, methods=["POST"])

    generating(prepare_completion, "/v1/completions", "/completions")
    generating(prepare_chat, "/v1/chat/completions", "/chat/completions")
    generating(prepare_generate, "/generate")
    generating(prepare_tokens, "/inference/v1/generate")


def _add_model_routes(app: Quart, service: Service) -> None:
    @app.get("/v1/models")
    @app.get("/models")
    async def models() -> Response:
        return json_response(model_list(await service.joined_model()))

    @app.get("/v1/models/<path:name>")
    @app.get("/models/<path:name>")
    async def one_model(name: str) -> Response:
        model = await service.joined_model()
        return json_response(model_entry(model, model.answers_to(name.rstrip("/"))))


def _add_token_routes(app: Quart, service: Service) -> None:
    def telling(act: Callable[[bytes, ServedModel], Struct], *paths: str) -> None:
        async def post() -> Response:
            model = await service.joined_model()
            body = await _body()
            return json_bytes(await model.prepare(body, lambda: encode_json(act(body, model))))

        for path in paths:
            app.add_url_rule(path, path, post, methods=["POST"])

    telling(tokenize, "/tokenize", "/v1/tokenize")
    telling(detokenize, "/detokenize", "/v1/detokenize")


def _add_status_routes(app: Quart, service: Service) -> None:
    @app.get("/health")
    @app.get("/ready")
    @app.get("/ping")
    async def get_health() -> Response:
        body = health(service)
        return json_response(body, 200 if body.status == "ok" else 503)

    @app.get("/liveness")
    async def get_liveness() -> Response:
        return json_response(Version())  # whatever the fleet does, this process answers

    @app.get("/health_generate")
    async def get_health_generate() -> Response:
        return json_response(await generate_for_health(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render_metrics(await service.client.stats()), content_type=CONTENT_TYPE)

    @app.get("/version")
    async def get_version() -> Response:
        return json_response(Version())

    @app.get("/server_info")
    async def get_server_info() -> Response:
        return json_response(server_info(service))

    @app.get("/load")
    async def get_load() -> Response:
        return json_response(load(await service.client.stats()))

    @app.get("/openapi.json")
    async def get_openapi() -> Response:
        return json_response(openapi())

    app.register_blueprint(page_routes(service.client.stats, lambda: service.client.fleet))


def _add_error_handlers(app: Quart) -> None:
    @app.errorhandler(HomingError)
    async def on_homing_error(error: HomingError) -> Response:
        response = json_response(error_body(error), status_of(error))
        response.headers.update(headers_of(error))
        return response

    @app.errorhandler(HTTPException)
    async def on_http_exception(error: HTTPException) -> Response:
        status = error.code or 500
        message = error.description or error.name
        if status == 404:
            message = f"{request.method} {request.path} is not served here"
        response = json_response(http_error_body(status, message), status)
        if status == 405:
            response.headers.update({k: v for k, v in error.get_headers() if k == "Allow"})
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    @app.errorhandler(Exception)
    async def on_bug(error: Exception) -> Response:
        app.logger.exception("%s %s failed", request.method, request.path, exc_info=error)
        return json_response(error_body(InternalError("internal error; the log says why")), 500)


def _call(service: Service, model: ServedModel) -> Call:
    stopwatch = Stopwatch(service.measures)
    return Call(service.client, model.tokenizer, model.thread, stopwatch, g.request_id, g.tenant)


async def _body() -> bytes:
    return cast(bytes, await request.get_data())  # str is for who asks for it


def _request_id() -> str:
    """The client's own, if it is fit for a header, or a new one."""
    given = request.headers.get("X-Request-Id", "")
    fit = 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    return given if fit else secrets.token_hex(16)
