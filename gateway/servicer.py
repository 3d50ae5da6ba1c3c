"""InferenceService: what gRPC clients speak."""

from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from common.telemetry import Span, carrier_from
from common.wire import (
    finish_reason_to_proto,
    inference,
    inference_grpc,
    logprobs_to_proto,
    phases_to_proto,
    usage_to_proto,
)
from gateway.registry import WorkerRegistry
from gateway.request import Delta, OutputEvent, Request
from gateway.serving import Service
from gateway.spans import CHAT, TEXT_COMPLETION
from gateway.tokenizer import IdTokenizer

Context = aio.ServicerContext[Any, Any]


class InferenceServicer(inference_grpc.InferenceServiceServicer):
    """Raises BatonErrors; the server's boundary turns them into statuses. Where API keys are
    required every call has one in its metadata, as ``authorization: Bearer KEY``."""

    def __init__(
        self,
        gateway_id: str,
        service: Service,
        registry: WorkerRegistry,
        tokenizer: IdTokenizer,
    ) -> None:
        self._gateway_id = gateway_id
        self._service = service
        self._registry = registry
        self._tokenizer = tokenizer

    def _tenant(self, context: Context) -> str:
        """Raises Unauthenticated."""
        given = ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and isinstance(value, str):
                given = value
        return self._service.keys.tenant(given)

    async def Generate(
        self, request: inference.GenerateRequest, context: Context
    ) -> AsyncIterator[inference.GenerateResponse]:
        async with self._service.serve(
            [request],
            self._tenant(context),
            carrier_from(context.invocation_metadata()),
            CHAT if request.WhichOneof("input") == "chat" else TEXT_COMPLETION,
            time_remaining_s=context.time_remaining(),
        ) as exchange:
            await context.send_initial_metadata(tuple(exchange.headers.items()))
            async for index, event in exchange.events:
                yield _response(exchange.requests[index], event, exchange.span)

    async def GetModelInfo(
        self, request: inference.GetModelInfoRequest, context: Context
    ) -> inference.GetModelInfoResponse:
        self._tenant(context)
        facts = self._service.parser.facts()
        entry = next(iter(self._registry.entries.values()), None)
        return inference.GetModelInfoResponse(
            model=facts.name,
            fingerprint=facts.fingerprint,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            dtype=entry.report.layout.dtype if entry else "",
            block_size=self._registry.block_size,
            eos_token_ids=facts.eos_token_ids,
            has_tokenizer=self._tokenizer.entry is not None,
            has_chat_template=self._tokenizer.has_chat_template,
        )

    async def ListWorkers(
        self, request: inference.ListWorkersRequest, context: Context
    ) -> inference.ListWorkersResponse:
        self._tenant(context)
        now = self._registry.clock()
        response = inference.ListWorkersResponse(gateway_id=self._gateway_id)
        for entry in sorted(self._registry.entries.values(), key=lambda e: e.worker_id):
            report = entry.report
            response.workers.add(
                worker_id=report.worker_id,
                role=report.role,
                epoch=report.epoch,
                endpoint=report.endpoint,
                pid=report.pid,
                state=report.state,
                transports=report.transports,
                bytes_moved=dict(report.load.bytes_moved),
                running=report.load.running,
                waiting=report.load.waiting,
                blocks=report.load.blocks,
                admin_endpoint=report.admin_endpoint,
                age_s=now - entry.heard_s,
                kv_links=dict(report.load.kv_links),
            )
        for worker_id, (role, mismatch, _) in sorted(self._registry.refused.items()):
            response.refused.add(
                worker_id=worker_id,
                role=role,
                field=mismatch.field,
                expected=mismatch.expected,
                actual=mismatch.actual,
            )
        return response


def _response(request: Request, event: OutputEvent, span: Span) -> inference.GenerateResponse:
    if isinstance(event, Delta):
        # Filled in place: a message given to another is copied.
        response = inference.GenerateResponse(choice=request.choice)
        chunk = response.chunk
        chunk.index = event.index
        chunk.token_ids.extend(event.token_ids)
        chunk.text = event.text
        if event.logprobs:
            chunk.logprobs.extend(logprobs_to_proto(event.logprobs))
        if event.prompt_logprobs:
            chunk.prompt_logprobs.extend(logprobs_to_proto(event.prompt_logprobs))
        return response
    complete = inference.Complete(
        finish_reason=finish_reason_to_proto(event.finish_reason),
        usage=usage_to_proto(event.usage),
        phases_ms=phases_to_proto(event.phases_ms),
        request_id=request.client_request_id or request.request_id,
        trace_id=span.trace_id,
        attempts=event.attempts,
        seed=event.seed,
    )
    if event.matched_token_id is not None:
        complete.matched_token_id = event.matched_token_id
    elif event.matched_string is not None:
        complete.matched_string = event.matched_string
    return inference.GenerateResponse(choice=request.choice, complete=complete)
