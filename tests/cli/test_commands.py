"""The command line: help, flags, and errors as one line with the right exit status."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.launch_plan import CHOSEN
from cli.main import main
from common.config import DecodeSettings, GatewaySettings, PrefillSettings


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


Baton = Callable[..., Result]


@pytest.fixture
def baton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Baton:
    """Runs the command in this process, where no `baton up` is to be found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return Result(int(exit_info.value.code or 0), captured.out, captured.err)

    return run


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "cli.main", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith("baton ")


def test_help_lists_every_command(baton: Baton) -> None:
    result = baton("-h")
    assert result.returncode == 0
    for name in ("up", "generate", "chat", "status", "trace", "prepare", "gateway", "decode"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("command", "kind"),
    [("gateway", GatewaySettings), ("prefill", PrefillSettings), ("decode", DecodeSettings)],
)
def test_every_setting_of_a_process_is_a_flag_with_its_text(
    baton: Baton, command: str, kind: type
) -> None:
    result = baton(command, "--help")
    assert result.returncode == 0
    for name in kind.model_fields:  # type: ignore[attr-defined]
        assert f"--{name.replace('_', '-')}" in result.stdout, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "hi"], "address: no `baton up` is running here"),
        (["status", "--json"], "address: no `baton up` is running here"),
        (["trace", "abc", "--json"], "address: no `baton up` is running here"),
        (["generate", "--address", "127.0.0.1:1"], "prompt: give a text or --token-ids"),
        (
            ["generate", "a", "--token-ids", "1", "--address", "a:1"],
            "prompt: give a text or --token-ids, not both",
        ),
        (["status", "--address", "localhost"], "address: 'localhost' is not HOST:PORT"),
        (["status", "--address", "a:65536"], "address: 'a:65536' is not HOST:PORT"),
        (["generate", "--token-ids", "1,x", "--address", "127.0.0.1:1"], "token-ids: must be"),
        (["prepare", "--model", "/nowhere"], "model: /nowhere is neither"),
        (["up", "--decode", "0", "--model", "oracle"], "decode: at least one"),
        (["up", "--num-blocks", "1", "--model", "oracle"], "num_blocks: "),
        (
            ["up", "--json", "--grpc-port", "0", "--http-port", "0", "--model", "/nowhere"],
            "model: /nowhere is neither",
        ),
        (["prefill", "--lease-s", "soon", "--model", "oracle"], "lease_s: "),
        (["decode", "--local-prefill", "maybe", "--model", "oracle"], "local_prefill: "),
        (["gateway", "--config", "/nowhere.yaml"], "config: cannot read"),
    ],
)
def test_what_was_asked_wrongly_is_one_line_and_status_2(
    baton: Baton, arguments: list[str], message: str
) -> None:
    result = baton(*arguments)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith(f"error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_settings_come_from_the_environment_and_yaml_too(
    baton: Baton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_BLOCK_SIZE", "0")
    result = baton("prefill", "--model", "oracle")
    assert result.returncode == 2 and result.stderr.startswith("error: block_size: ")
    monkeypatch.delenv("BATON_BLOCK_SIZE")
    config = tmp_path / "baton.yaml"
    config.write_text("block_size: 9999\n")
    result = baton("prefill", "--model", "oracle", "--config", str(config))
    assert result.returncode == 2 and result.stderr.startswith("error: block_size: ")


def test_unknown_flags_are_status_2(baton: Baton) -> None:
    assert baton("up", "--no-such-flag").returncode == 2
    assert baton("fly").returncode == 2


def test_a_gateway_that_is_not_there_is_status_1(baton: Baton) -> None:
    result = baton("status", "--address", "127.0.0.1:1")
    assert (result.returncode, result.stdout) == (1, "")
    text = "error: no gateway answers at 127.0.0.1:1; is `baton up` running?\n"
    assert result.stderr == text


def test_help_in_80_columns_cuts_no_setting(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = baton("up", "--help").stdout
    for name in GatewaySettings.model_fields | DecodeSettings.model_fields:
        if name not in CHOSEN:
            assert f"--{name.replace('_', '-')}" in shown, name
    assert "512 MiB" in " ".join(shown.split())
