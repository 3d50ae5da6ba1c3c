"""generate, chat and status against a scripted gateway: what they send and what they print."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import pytest

from cli.main import main
from common.wire import inference, inference_grpc

ANSWER = ["The ", "capital is ", "Paris."]


@dataclass
class Gateway(inference_grpc.InferenceServiceServicer):
    """Answers each request with ANSWER, or refuses prompts that say so."""

    requests: list[inference.GenerateRequest] = field(default_factory=list)

    def Generate(
        self, request: inference.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.GenerateResponse]:
        self.requests.append(request)
        if request.text == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: must be at least 1")
        for index, text in enumerate(ANSWER):
            yield inference.GenerateResponse(
                chunk=inference.Chunk(index=index, token_ids=[index + 10], text=text)
            )
        yield inference.GenerateResponse(
            complete=inference.Complete(
                finish_reason=inference.FINISH_REASON_LENGTH,
                usage=inference.Usage(prompt_tokens=5, output_tokens=3, prefill_computed=5),
                phases_ms=inference.PhasesMs(prefill=1.5321, total=9.0),
                request_id="r1",
                trace_id="a" * 32,
                text="!",
            )
        )

    def ListWorkers(
        self, request: inference.ListWorkersRequest, context: grpc.ServicerContext
    ) -> inference.ListWorkersResponse:
        blocks = inference.BlockCounts(total=64, free=60, cached=1, in_use=1, leased=1, importing=1)
        worker = inference.WorkerStatus(
            worker_id="decode-1",
            role="decode",
            epoch=7,
            endpoint="127.0.0.1:5",
            pid=42,
            state="ready",
            transports=["shm"],
            bytes_moved={"shm": 4096},
            kv_links={"prefill-1": "shm: reached"},
            running=2,
            waiting=1,
            blocks=blocks,
        )
        refused = inference.RefusedWorker(
            worker_id="prefill-9", role="prefill", field="block_size", expected="16", actual="32"
        )
        return inference.ListWorkersResponse(workers=[worker], refused=[refused])


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    servicer = Gateway()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    inference_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("BATON_ADDRESS", f"127.0.0.1:{port}")
    yield servicer
    server.stop(None).wait()


Baton = Callable[..., tuple[int, str, str]]


@pytest.fixture
def baton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Baton:
    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


def test_generate_streams_the_text(gateway: Gateway, baton: Baton) -> None:
    status, out, err = baton(
        "generate", "Where?", "--max-tokens", "3", "--stop", "x", "--stop", "y"
    )
    assert (status, out) == (0, "The capital is Paris.!\n")
    assert "5 + 3 tokens" in err and "baton trace r1" in err
    (request,) = gateway.requests
    assert request.text == "Where?"
    assert request.sampling.max_tokens == 3 and list(request.sampling.stop) == ["x", "y"]
    assert not request.sampling.HasField("temperature")


def test_generate_json_is_one_object_and_nothing_else(gateway: Gateway, baton: Baton) -> None:
    status, out, err = baton("generate", "--token-ids", "1,2,3", "--seed", "9", "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert list(answer) == [
        "request_id", "text", "token_ids", "finish_reason", "usage", "phases_ms", "seed",
        "trace_id",
    ]  # fmt: skip
    assert answer["text"] == "The capital is Paris.!"
    assert answer["token_ids"] == [10, 11, 12]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prefill_computed"] == 5 and answer["phases_ms"]["prefill"] == 1.5
    assert list(gateway.requests[0].token_ids.ids) == [1, 2, 3]
    assert gateway.requests[0].sampling.seed == 9


def test_greedy_is_sent_as_such(gateway: Gateway, baton: Baton) -> None:
    baton("generate", "a", "--temperature", "0", "--chat", "--json")
    (request,) = gateway.requests
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "a")]


def test_what_the_gateway_refuses_is_one_line(gateway: Gateway, baton: Baton) -> None:
    status, out, err = baton("generate", "refuse", "--json")
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and "max_tokens" in err and err.count("\n") == 1


def test_chat_sends_the_whole_conversation(gateway: Gateway, baton: Baton) -> None:
    status, out, _ = baton("chat", "--system", "Be brief.", stdin="one\ntwo\n/exit\n")
    assert status == 0 and out.count("Paris.!") == 2
    sent = [[(m.role, m.content) for m in r.chat.messages] for r in gateway.requests]
    answer = ("assistant", "The capital is Paris.!")
    assert sent[0] == [("system", "Be brief."), ("user", "one")]
    assert sent[1] == [("system", "Be brief."), ("user", "one"), answer, ("user", "two")]


def test_chat_ends_with_its_input(gateway: Gateway, baton: Baton) -> None:
    assert baton("chat", stdin="one\n")[0] == 0
    assert len(gateway.requests) == 1


def test_status_json_has_the_promised_fields(gateway: Gateway, baton: Baton) -> None:
    status, out, err = baton("status", "--json")
    assert (status, err) == (0, "")
    content = json.loads(out)
    (worker,) = content["workers"]
    assert worker == {
        "id": "decode-1",
        "role": "decode",
        "epoch": 7,
        "endpoint": "127.0.0.1:5",
        "admin": "",
        "pid": 42,
        "state": "ready",
        "transport": "shm",
        "bytes_moved": 4096,
        "kv_links": {"prefill-1": "shm: reached"},
        "running": 2,
        "waiting": 1,
        "blocks": {
            "total": 64, "free": 60, "cached": 1, "in_use": 1, "leased": 1, "importing": 1,
        },
    }  # fmt: skip
    assert content["refused"][0]["field"] == "block_size"


def test_status_as_a_table(gateway: Gateway, baton: Baton) -> None:
    status, out, _ = baton("status")
    assert status == 0
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    for text in ("decode-1", "shm", "64", "in use", "block_size is 32, expected 16"):
        assert text in out
