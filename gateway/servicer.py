"""InferenceService: what gRPC clients speak."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc import aio
from opentelemetry.trace import SpanKind

from common.telemetry import Span, Telemetry, carrier_from
from common.wire import (
    finish_reason_to_proto,
    inference,
    inference_grpc,
    logprobs_to_proto,
    phases_to_proto,
    usage_to_proto,
)
from gateway.choices import merge
from gateway.parser import RequestParser
from gateway.pipeline import Pipeline
from gateway.registry import WorkerRegistry
from gateway.request import Completed, Delta, OutputEvent, Request
from gateway.request_log import recorded
from gateway.tokenizer import IdTokenizer

Context = aio.ServicerContext[Any, Any]


class InferenceServicer(inference_grpc.InferenceServiceServicer):
    """Raises BatonErrors; the server's boundary turns them into statuses."""

    def __init__(
        self,
        gateway_id: str,
        parser: RequestParser,
        pipeline: Pipeline,
        registry: WorkerRegistry,
        tokenizer: IdTokenizer,
        telemetry: Telemetry,
    ) -> None:
        self._gateway_id = gateway_id
        self._parser = parser
        self._pipeline = pipeline
        self._registry = registry
        self._tokenizer = tokenizer
        self._telemetry = telemetry

    async def Generate(
        self, request: inference.GenerateRequest, context: Context
    ) -> AsyncIterator[inference.GenerateResponse]:
        parent = carrier_from(context.invocation_metadata())
        with (
            self._telemetry.span("generate", parent, kind=SpanKind.SERVER) as span,
            recorded(span.trace_id) as record,
        ):
            requests = await self._parser.parse(request, context.time_remaining())
            first = requests[0]
            record.request_id = first.request_id
            record.num_prompt_tokens = len(first.prompt_ids)
            span.set("baton.request_id", first.request_id)
            span.set("gen_ai.usage.input_tokens", len(first.prompt_ids))
            await context.send_initial_metadata(
                (("baton-request-id", first.request_id), ("baton-trace-id", span.trace_id))
            )
            streams = [self._pipeline.generate(choice, span.carrier) for choice in requests]
            async with aclosing(merge(streams)) as events:
                async for index, event in events:
                    if isinstance(event, Completed):
                        record.ends.append(event)
                    yield _response(requests[index], event, span)

    async def GetModelInfo(
        self, request: inference.GetModelInfoRequest, context: Context
    ) -> inference.GetModelInfoResponse:
        facts = self._parser.facts()
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
