"""Sandboxes, keys, scopes, ports, tokens and events, by the blocking client."""

import threading
import uuid
from typing import Iterator, List

import pytest
from daemon import Daemon

import carrel


@pytest.fixture
def run_id(operator: carrel.Carrel) -> Iterator[str]:
    one = f"run_{uuid.uuid4().hex[:12]}"
    yield one
    operator.scopes.close("workflow", one)


def test_same_name_same_sandbox(client: carrel.Carrel) -> None:
    first = client.sandbox("named", labels={"team": "a"})
    second = client.sandbox("named")
    assert (first.info.created, second.info.created) == (True, False)
    assert first.id == second.id
    assert first.name == "named"
    assert first.key
    assert [one.id for one in client.sandboxes.list(labels={"team": "a"})] == [first.id]
    assert client.sandboxes.get(first.key).id == first.id
    assert client.sandboxes.get(first.id).key == first.key
    first.close()
    first.close()
    with pytest.raises(carrel.SandboxNotFound) as caught:
        client.sandboxes.get(first.id)
    assert (caught.value.status, caught.value.code) == (404, "sandbox_not_found")
    with pytest.raises(carrel.SandboxNotFound):
        client.sandboxes.get("user:local:never")


def test_steps_of_a_run_share_one_and_its_scope_closes_it(operator: carrel.Carrel, run_id: str) -> None:
    first = operator.sandbox(workflow_run=run_id)
    assert operator.sandbox(workflow_run=run_id).id == first.id
    assert operator.sandbox(key=f"workflow:{run_id}:default").id == first.id
    second = operator.sandbox(workflow_run=run_id, session="second")
    assert second.id != first.id
    assert len({operator.sandbox(workflow_run=run_id, session="isolated").id for _ in range(2)} | {first.id}) == 3
    closed = operator.scopes.close("workflow", run_id)
    assert {first.id, second.id} <= set(closed.closed)
    assert len(closed.closed) == 4
    with pytest.raises(carrel.CarrelError):
        operator.sandbox(workflow_run=run_id)


def test_a_spec(operator: carrel.Carrel) -> None:
    with operator.sandbox(spec={"mode": "code", "limits": {"memory_mb": 256}}) as sandbox:
        assert sandbox.info.limits["memory"] == 256 * 1024 * 1024
    with operator.sandbox(
        spec="---\nsandbox:\n  mode: compute\n  limits: {workspace_mb: 64}\n---\nAn agent.\n"
    ) as sandbox:
        assert sandbox.info.limits["disk"] == 64 * 1024 * 1024
    with pytest.raises(carrel.InvalidArgument, match="colour"):
        operator.sandbox(spec={"colour": "red"})


def test_update_wake_metrics_close_and_return(client: carrel.Carrel) -> None:
    sandbox = client.sandbox(f"u-{uuid.uuid4().hex[:8]}", limits={"memory": 300_000_000}, idle_timeout=900)
    assert sandbox.info.idle_timeout_seconds == 900
    info = sandbox.update(labels={"stage": "test"}, idle_timeout=1200)
    assert (info.labels, info.idle_timeout_seconds) == ({"stage": "test"}, 1200)
    sandbox.files.write("kept", "x")
    sandbox.close(delete_workspace=False)
    assert sandbox.wake().state == "running"
    assert sandbox.files.read("kept") == b"x"
    metrics = sandbox.metrics()
    assert metrics.disk_limit
    sandbox.close()


def test_module_level(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.delenv("CARREL_TOKEN", raising=False)
    monkeypatch.setenv("CARREL_SOCKET", daemon.socket)
    with carrel.sandbox("module") as sandbox:
        assert sandbox.run("1 + 1", env="python").text == "2"
        assert carrel.sandbox("module").id == sandbox.id
    carrel.client().close()


def test_ports(client: carrel.Carrel, daemon: Daemon) -> None:
    with client.sandbox() as sandbox:
        with pytest.raises(carrel.PortClosed):
            sandbox.ports.request(8000)
        sandbox.files.write("site/index.html", "<h1>hello</h1>")
        with sandbox.exec(["python3", "-m", "http.server", "8000", "--directory", "site"]):
            assert sandbox.ports.wait(8000).port == 8000
            page = sandbox.ports.request(8000, "/index.html")
            assert page.text == "<h1>hello</h1>"
            assert sandbox.ports.request(8000, "/missing").status_code == 404
            assert sandbox.ports.request(8000, "/", "POST", content="x").status_code == 501
            share = sandbox.ports.share(8000, expires=60)
            import httpx

            shared = httpx.get(daemon.url + share.path + "index.html", trust_env=False)
            assert shared.text == "<h1>hello</h1>"
            if client._http.place.socket:
                with pytest.raises(carrel.Unavailable):
                    sandbox.ports.url(8000)
            else:
                assert share.url == daemon.url + share.path
                assert sandbox.ports.url(8000) == f"{daemon.url}/v1/sandboxes/{sandbox.id}/ports/8000/"
    assert httpx.get(daemon.url + share.path, trust_env=False).status_code >= 400


def test_environments_and_whoami(client: carrel.Carrel) -> None:
    found = {environment.name: environment for environment in client.environments()}
    assert found["python"].available
    who = client.whoami()
    assert (who.token is None) == bool(client._http.place.socket)


def test_tokens(operator: carrel.Carrel, daemon: Daemon) -> None:
    made = operator.tokens.create("short", quota={"sandboxes": 1}, expires=600)
    assert made.id in {token.id for token in operator.tokens.list()}
    assert all(token.token is None for token in operator.tokens.list())
    with carrel.Carrel(daemon.url, made.token) as client:
        with client.sandbox("mine") as mine:
            with pytest.raises(carrel.QuotaExceeded) as caught:
                client.sandbox("more")
            assert caught.value.status == 429
            assert [one.id for one in client.sandboxes.list()] == [mine.id]
            with operator.sandbox() as other, pytest.raises(carrel.SandboxNotFound):
                client.sandboxes.get(other.id)
            with pytest.raises(carrel.CarrelError):
                client.tokens.list()
        operator.tokens.revoke(made.id)
        with pytest.raises(carrel.Unauthorized):
            client.whoami()
    with carrel.Carrel(daemon.url, "wrong") as nobody, pytest.raises(carrel.Unauthorized):
        nobody.whoami()


def test_events(operator: carrel.Carrel) -> None:
    with operator.sandbox() as sandbox:
        # From the start, so that it does not matter which is first: the reader or the run.
        found: List[carrel.Event] = []

        def read() -> None:
            for event in operator.events(sandbox=sandbox.id, kind="run.", since=0):
                if event.kind != "gap":
                    found.append(event)
                if event.kind == "run.finished":
                    return

        reader = threading.Thread(target=read)
        reader.start()
        sandbox.run("1", env="python").check()
        reader.join(60)
        assert not reader.is_alive()
    assert [event.kind for event in found] == ["run.started", "run.finished"]
    assert all(event.id for event in found)


def test_bad_requests_are_typed(client: carrel.Carrel) -> None:
    with pytest.raises(carrel.InvalidArgument) as caught:
        client.sandbox(env="no-such-environment")
    assert caught.value.code == "environment_unknown"
    assert caught.value.request_id
    with pytest.raises(carrel.CarrelError):
        client.sandbox(key="nonsense")


def test_standby_and_wake(operator: carrel.Carrel) -> None:
    with operator.sandbox(standby_after=600, hibernate_after=0) as sandbox:
        assert (sandbox.info.standby_after_seconds, sandbox.info.hibernate_after_seconds) == (600, 0)
        sandbox.run("x = 5")
        try:
            assert sandbox.standby().state == "standby"
        except carrel.CarrelError as error:
            if error.code != "unsupported":
                raise
            pytest.skip(str(error))
        assert sandbox.refresh().state == "standby"
        assert sandbox.run("x").text == "5"
        assert sandbox.refresh().state == "running"
        sandbox.standby()
        assert sandbox.wake().state == "running"
        assert sandbox.update(standby_after=0).standby_after_seconds == 0
