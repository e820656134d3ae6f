"""Replies as values."""

import base64
from pathlib import Path
from typing import Any, Dict

import pytest

import carrel
from carrel._models import Entry, SandboxInfo, Token
from carrel._result import ExecInfo, Result

PNG = b"\x89PNG\r\n"
REPLY: Dict[str, Any] = {
    "sandbox": "sbx_1", "session": "default", "exec": "ex_1", "environment": "python", "language": "python",
    "exit_code": 0, "cause": "exit", "session_state": "preserved", "stdout": "hi\n", "stderr": {"base64": "/w=="},
    "results": [
        {"kind": "display", "mime": {"image/png": base64.b64encode(PNG).decode(), "text/plain": "<Figure>"}},
        {"kind": "display", "mime": {"image/svg+xml": "<svg/>"}},
        {"kind": "result", "mime": {"text/plain": "42"}},
    ],
    "exception": None, "error": None, "receipt": {"duration_us": 480, "of_tomorrow": 1}, "note": None, "of_tomorrow": 1,
}  # fmt: skip


def test_a_reply() -> None:
    result = Result.parse(REPLY)
    assert result.ok
    assert result.check() is result
    assert (result.stdout, result.stdout_bytes) == ("hi\n", b"hi\n")
    assert (result.stderr, result.stderr_bytes) == ("\ufffd", b"\xff")
    assert result.text == "42"
    assert result.png == PNG
    assert [(image.mime, image.data) for image in result.images] == [("image/png", PNG), ("image/svg+xml", b"<svg/>")]
    assert result.receipt.duration_us == 480
    assert (result.receipt.files.added, result.receipt.files.complete, result.receipt.running) == ([], False, [])
    assert result.raw["of_tomorrow"] == 1


def test_images_are_saved(tmp_path: Path) -> None:
    image = Result.parse(REPLY).images[0]
    assert image.save(tmp_path / "x.png").read_bytes() == PNG


def test_nothing_shown() -> None:
    result = Result.parse({**REPLY, "results": []})
    assert (result.text, result.png, result.images) == (None, None, [])


@pytest.mark.parametrize(
    ("change", "message", "code"),
    [
        ({"exit_code": 1, "exception": {"name": "NameError", "message": "no x"}}, "NameError: no x", "run_failed"),
        ({"exit_code": 3, "stderr": "first\nlast\n"}, "exit code 3: last", "run_failed"),
        ({"exit_code": 137, "cause": "oom", "stderr": ""}, "ended by oom", "run_failed"),
        (
            {
                "exit_code": 124,
                "cause": "timeout",
                "error": {"code": "timeout", "message": "ran too long", "hint": "h"},
            },
            "ran too long",
            "timeout",
        ),
    ],
)
def test_check_says_what_went_wrong(change: Dict[str, Any], message: str, code: str) -> None:
    result = Result.parse({**REPLY, **change})
    assert not result.ok
    with pytest.raises(carrel.RunFailed) as caught:
        result.check()
    assert caught.value.message == message
    assert caught.value.code == code
    assert caught.value.session_state == "preserved"
    assert caught.value.result is result


def test_the_error_of_a_result_is_typed() -> None:
    result = Result.parse({**REPLY, "error": {"code": "timeout", "message": "x"}})
    assert isinstance(result.error, carrel.Timeout)


def test_tolerant_readers() -> None:
    info = SandboxInfo.parse({"id": "sbx_1", "new": True})
    assert (info.id, info.key, info.limits) == ("sbx_1", None, {})
    run = ExecInfo.parse({"exec": "ex_1", "what": {"run": {"language": "python"}}, "running": True})
    assert (run.language, run.argv, run.outcome) == ("python", None, None)
    assert Entry.parse({"name": {"base64": "/w=="}, "kind": "file"}).name == "\udcff"


def test_a_token_is_not_shown_by_accident() -> None:
    token = Token.parse({"id": "t1", "token": "secret"})
    assert token.token == "secret"
    assert "secret" not in repr(token)
    assert "secret" not in repr(token.raw)
