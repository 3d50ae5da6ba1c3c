"""Every path of the public HTTP port."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router

from common.errors import InvalidRequest, ModelNotFound
from gateway.http.edge import taken_body
from gateway.http.generate import TokenRoutes, check_model, in_words_of_http
from gateway.http.messages import tokenize_request
from gateway.http.schemas import DetokenizeBody, TokenizeBody
from gateway.sampling import check_token_ids
from gateway.serving import Service
from gateway.tokenizer import IdTokenizer

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DISTRIBUTION = "baton-serve"


@dataclass(frozen=True, slots=True)
class Routes:
    """``created`` is when this gateway started, in seconds since 1970."""

    service: Service
    tokenizer: IdTokenizer
    is_ready: Callable[[], bool]
    metrics: Callable[[], str]
    created: int

    def router(self) -> Router:
        tokens = TokenRoutes(self.service, self.tokenizer)
        return Router(
            [
                Route("/health", _alive),
                Route("/ping", _alive, methods=["GET", "POST"]),
                Route("/ready", self._ready),
                Route("/version", _version),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", tokens.completions, methods=["POST"]),
                Route("/v1/chat/completions", tokens.chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
            ],
            redirect_slashes=False,
        )

    async def _ready(self, _: HttpRequest) -> Response:
        return Response(status_code=200 if self.is_ready() else 503)

    async def _metrics(self, _: HttpRequest) -> Response:
        return Response(self.metrics(), media_type=_METRICS_TYPE)

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, http: HttpRequest) -> Response:
        card = self._card()
        if http.path_params["name"] != card["id"]:
            raise ModelNotFound("this model is not served; the list of models says what is")
        return JSONResponse(card)

    def _card(self) -> dict[str, Any]:
        facts = self.service.parser.facts()
        return {
            "id": facts.name,
            "object": "model",
            "created": self.created,
            "owned_by": "baton",
            "root": facts.name,
            "parent": None,
            "max_model_len": facts.max_model_len,
            "permission": [],
        }

    async def _tokenize(self, http: HttpRequest) -> Response:
        body = TokenizeBody.parse(taken_body(http.scope))
        check_model(self.service.parser, body)
        try:
            ids = await self.service.parser.prompt_ids(tokenize_request(body))
        except InvalidRequest as error:
            raise in_words_of_http(error, body) from None
        facts = self.service.parser.facts()
        content = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
        if body.return_token_strs:
            if len(ids) > facts.max_model_len:
                raise InvalidRequest("return_token_strs", f"at most {facts.max_model_len} tokens")
            content["token_strs"] = [self.tokenizer.token_text(token_id) for token_id in ids]
        return JSONResponse(content)

    async def _detokenize(self, http: HttpRequest) -> Response:
        body = DetokenizeBody.parse(taken_body(http.scope))
        check_model(self.service.parser, body)
        facts = self.service.parser.facts()
        if len(body.tokens) > facts.max_model_len:
            raise InvalidRequest("tokens", f"at most {facts.max_model_len} ids")
        ids = check_token_ids("tokens", body.tokens, facts)
        return JSONResponse({"prompt": self.tokenizer.decode(ids)})


async def _alive(_: HttpRequest) -> Response:
    """The process lives and its loop runs; whether it would serve is asked at /ready."""
    return PlainTextResponse("")


async def _version(_: HttpRequest) -> Response:
    return JSONResponse({"version": importlib.metadata.version(_DISTRIBUTION)})
