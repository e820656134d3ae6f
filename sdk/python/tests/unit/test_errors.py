"""Problem documents as exceptions."""

import inspect
import pickle
from typing import Any, Dict, Type

import pytest

import carrel
from carrel import _errors as errors


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("sandbox_not_found", 404, carrel.SandboxNotFound),
        ("exec_ended", 409, carrel.ExecEnded),
        ("quota", 429, carrel.QuotaExceeded),
        ("rate_limited", 429, carrel.RateLimited),
        ("too_many", 429, carrel.RateLimited),
        ("timeout", 504, carrel.Timeout),
        ("port_closed", 502, carrel.PortClosed),
        ("disk", 507, carrel.DiskFull),
        ("path_outside", 400, carrel.InvalidArgument),
        ("permission", 403, carrel.Forbidden),
        ("is_a_directory", 409, carrel.Conflict),
        ("interpreter_missing", 422, carrel.Unprocessable),
        ("never_heard_of", 404, carrel.NotFound),
        ("never_heard_of", 418, carrel.CarrelError),
        ("never_heard_of", 599, carrel.ServerError),
        (None, 401, carrel.Unauthorized),
    ],
)
def test_class_by_code_then_by_status(code: str, status: int, kind: Type[carrel.CarrelError]) -> None:
    error = errors.from_problem({"code": code, "detail": "what"}, status)
    assert type(error) is kind
    assert error.status == status
    assert error.message == "what"
    if code:
        assert error.code == code


def test_everything_a_problem_says_is_there() -> None:
    problem: Dict[str, Any] = {
        "title": "Too Many Requests",
        "status": 429,
        "detail": "slow down",
        "code": "rate_limited",
        "hint": "wait",
        "session_state": "preserved",
    }
    error = errors.from_problem(problem, None, {"retry-after": "3", "x-request-id": "r1"})
    assert (error.status, error.hint, error.session_state) == (429, "wait", "preserved")
    assert (error.retry_after, error.request_id) == (3.0, "r1")
    assert str(error) == "slow down [rate_limited]\nhint: wait"


def test_an_error_that_no_daemon_wrote() -> None:
    error = errors.from_response(502, {"content-type": "text/html"}, b"<h1>Bad \xff Gateway</h1>")
    assert type(error) is carrel.ServerError
    assert "Bad" in error.message
    assert isinstance(errors.from_response(500, {"content-type": "application/json"}, b"[1"), carrel.ServerError)
    assert isinstance(errors.from_response(404, {"content-type": "application/json"}, b"[]"), carrel.NotFound)


def test_builtin_relatives() -> None:
    assert issubclass(carrel.Timeout, TimeoutError)
    assert issubclass(carrel.ConnectionFailed, ConnectionError)
    assert issubclass(carrel.InvalidArgument, ValueError)


def test_all_errors_are_exported() -> None:
    for name, value in inspect.getmembers(errors, inspect.isclass):
        if issubclass(value, carrel.CarrelError):
            assert getattr(carrel, name) is value
            assert name in carrel.__all__


def test_errors_travel_between_processes() -> None:
    error = errors.from_problem({"code": "busy", "detail": "x", "hint": "h", "session_state": "lost"}, 409)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is carrel.Busy
    assert vars(again) == vars(error)
