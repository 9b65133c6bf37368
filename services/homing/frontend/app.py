"""The routes. What they do is elsewhere."""

from __future__ import annotations

import secrets

from quart import Quart, Response, g, request
from werkzeug.exceptions import HTTPException

from homing.errors import HomingError, InternalError
from homing.frontend.access import Access, AccessSettings
from homing.frontend.chat import chat_job
from homing.frontend.completions import completion_job, native_job
from homing.frontend.control_routes import control_routes
from homing.frontend.http_errors import error_body, headers_of, http_error_body, status_of
from homing.frontend.measures import Stopwatch
from homing.frontend.metrics import CONTENT_TYPE, render_metrics
from homing.frontend.native import GenerateReply, TokensReply, read_generate, read_tokens
from homing.frontend.openai.chat_reply import ChatReply
from homing.frontend.openai.completion_reply import CompletionReply
from homing.frontend.openai.requests import read_chat, read_completion
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
from homing.frontend.stream import Call, answer, json_response
from homing.frontend.token_routes import detokenize, tokenize


def create_app(service: Service, settings: AccessSettings | None = None) -> Quart:
    """The application over one service."""
    app = Quart("homing.frontend")
    access = Access(settings or AccessSettings())
    app.url_map.strict_slashes = False  # clients that add a slash do not follow a redirected POST
    app.url_map.merge_slashes = False
    _add_openai_routes(app, service)
    _add_native_routes(app, service)
    _add_token_routes(app, service)
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


def _add_openai_routes(app: Quart, service: Service) -> None:
    @app.post("/v1/completions")
    @app.post("/completions")
    async def completions() -> Response:
        model = await service.joined_model()
        call = _call(service, model)
        body = read_completion(await request.get_data())
        name = model.answers_to(body.model)
        job = await completion_job(body, model)
        reply = CompletionReply(body, name, model.tokenizer, [p.token_ids for p in job.prompts])
        return await answer(job, reply, call)

    @app.post("/v1/chat/completions")
    @app.post("/chat/completions")
    async def chat_completions() -> Response:
        model = await service.joined_model()
        call = _call(service, model)
        body = read_chat(await request.get_data())
        name = model.answers_to(body.model)
        job = await chat_job(body, model)
        reply = ChatReply(body, name, model.tokenizer, job.prompts[0].token_ids)
        return await answer(job, reply, call)

    @app.get("/v1/models")
    @app.get("/models")
    async def models() -> Response:
        return json_response(model_list(await service.joined_model()))

    @app.get("/v1/models/<path:name>")
    @app.get("/models/<path:name>")
    async def one_model(name: str) -> Response:
        model = await service.joined_model()
        return json_response(model_entry(model, model.answers_to(name.rstrip("/"))))


def _add_native_routes(app: Quart, service: Service) -> None:
    @app.post("/generate")
    async def post_generate() -> Response:
        model = await service.joined_model()
        call = _call(service, model)
        body = read_generate(await request.get_data())
        model.answers_to(body.completion.model)
        job = await native_job(body, model)
        reply = GenerateReply(
            body,
            model.tokenizer,
            [prompt.token_ids for prompt in job.prompts],
            request_id=body.completion.request_id or call.request_id,
            epoch=service.client.fleet.epoch,
        )
        return await answer(job, reply, call)

    @app.post("/inference/v1/generate")
    async def generate_tokens() -> Response:
        model = await service.joined_model()
        call = _call(service, model)
        body = read_tokens(await request.get_data())
        model.answers_to(body.completion.model)
        job = await native_job(body, model)
        return await answer(
            job, TokensReply(body, model.tokenizer, request_id=call.request_id), call
        )


def _add_token_routes(app: Quart, service: Service) -> None:
    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def post_tokenize() -> Response:
        model = await service.joined_model()
        return json_response(await tokenize(await request.get_data(), model))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def post_detokenize() -> Response:
        model = await service.joined_model()
        return json_response(detokenize(await request.get_data(), model))


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
    return Call(service.client, model.tokenizer, stopwatch, g.request_id, g.tenant)


def _request_id() -> str:
    """The client's own, if it is fit for a header, or a new one."""
    given = request.headers.get("X-Request-Id", "")
    fit = 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable()
    return given if fit else secrets.token_hex(16)
