"""Where the daemon is looked for."""

import gc
import os
from typing import Dict

import pytest

import carrel
from carrel._config import find


def test_arguments_win_over_the_environment() -> None:
    environ = {"CARREL_URL": "http://127.0.0.1:1", "CARREL_TOKEN": "env", "CARREL_SOCKET": "/s"}
    assert find("http://127.0.0.1:2/", "arg", None, environ).base_url == "http://127.0.0.1:2"
    assert find("http://127.0.0.1:2", "arg", None, environ).token == "arg"
    assert find(None, None, None, environ).base_url == "http://127.0.0.1:1"
    assert find(None, None, None, environ).token == "env"
    assert find(None, None, "/t", environ).socket == "/t"


@pytest.mark.parametrize("root", [True, False])
def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    environ: Dict[str, str] = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    usual = "/run/carrel/carrel.sock" if root else "/run/user/1000/carrel/carrel.sock"
    assert find(environ=environ).socket == usual
    assert find(environ={**environ, "CARREL_SOCKET": "/s"}).socket == "/s"
    if not root:
        assert find(environ={"HOME": "/home/me"}).socket == "/home/me/.local/state/carrel/run/carrel.sock"
        assert find(environ={"HOME": "/home/me", "CARREL_STATE": "/s"}).socket == "/s/run/carrel.sock"


def test_addresses() -> None:
    assert find("unix:/a%20b", environ={}).socket == "/a b"
    assert find("unix:///a", environ={}).socket == "/a"
    assert find("http://localhost:1", environ={}).loopback
    assert not find("https://carrel.example", environ={}).loopback


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://x", "http://", "unix:", "unix://host/path"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(carrel.InvalidArgument):
        find(url, environ={})


def test_two_places() -> None:
    with pytest.raises(carrel.InvalidArgument):
        find("http://localhost:1", None, "/s", {})


def test_the_token_is_not_shown_by_accident() -> None:
    with carrel.Carrel("http://localhost:1", "secret") as client:
        assert "secret" not in repr(client) + repr(client._http.place)


# httpcore leaves a socket that could not connect to the collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_no_daemon() -> None:
    with carrel.Carrel(socket="/nonexistent/carrel.sock", retries=1) as client:
        with pytest.raises(carrel.ConnectionFailed) as caught:
            client.sandbox("x")
        assert "unix:/nonexistent/carrel.sock" in str(caught.value)
        assert caught.value.hint
        with pytest.raises(carrel.ConnectionFailed):
            client.run("1", on_stdout=print)
    del caught
    gc.collect()
