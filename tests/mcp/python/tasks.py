"""What people do with the server, each as one task. `node/tasks.mjs` has the same ones: keep both alike."""

import asyncio
import json
import re

from connect import connect


class Skip(Exception):
    """What the task needs is not here."""


def check(holds, what):
    assert holds, what


def includes(text, *words):
    for word in words:
        assert word in text, f"{word!r} is not in: {text[:2000]}"


async def the_tools_are_listed(client, place):
    tools = {tool["name"]: tool for tool in await client.tools()}
    check(len(tools) == 13, sorted(tools))
    check(tools["run"]["inputSchema"]["required"] == ["code", "env"], tools["run"])
    check(tools["sandbox_fs_read"]["annotations"]["readOnlyHint"], tools["sandbox_fs_read"])
    check(tools["run"]["annotations"]["destructiveHint"], tools["run"])


async def variables_live_from_call_to_call(client, place):
    first = await client.run("import math\nradius = 3\ndef area(): return math.pi * radius ** 2", session="state")
    check(not first.failed, first.text)
    includes((await client.run("round(area(), 4)", session="state")).text, "28.2743")
    await client.run("radius = 1", session="state")
    includes((await client.run("print(round(area(), 4))", session="state")).text, "3.1416")


async def three_languages_share_one_sandbox(client, place):
    await client.run("open('numbers.txt', 'w').write('3\\n1\\n2\\n')", session="mixed")
    await client.run("sort numbers.txt > sorted.txt; export SEEN=yes", "bash", session="mixed")
    node = await client.run(
        "require('fs').readFileSync('sorted.txt', 'utf8').split('\\n').join('-')", "node", session="mixed"
    )
    includes(node.text, "1-2-3-")
    includes((await client.run("echo $SEEN; cat sorted.txt", "bash", session="mixed")).text, "yes\n1\n2\n3")


async def streams_and_value_are_told_apart(client, place):
    code = "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\n6 * 7"
    text = (await client.run(code, session="streams")).text
    check(text.index("to out") < text.index("stderr:\nto err") < text.index("value:\n42"), text)


async def files_made_come_back_as_links(client, place):
    code = "open('report ü.md', 'w').write('# Ünïcode')\nopen('all.bin', 'wb').write(bytes(range(256)) * 4)"
    made = await client.run(code, session="files")
    check(set(made.links) == {"report ü.md", "all.bin"}, made.links)
    check(await client.read(made.links["report ü.md"]) == "# Ünïcode", "the text")
    check(await client.read(made.links["all.bin"]) == bytes(range(256)) * 4, "the bytes")
    again = await client.run("print('nothing written')", session="files")
    check(not again.links, again.links)


async def a_plot_comes_back_as_a_picture(client, place):
    if (await client.run("import matplotlib, PIL", session="plot")).failed:
        raise Skip("no matplotlib in the sandbox's python")
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.show()"
    shown = await client.run(code, session="plot", timeout=80)
    check(len(shown.images) == 1, shown.text)
    mime, data = shown.images[0]
    check(mime == "image/png" and data.startswith(b"\x89PNG") and len(data) > 2000, (mime, len(data)))


async def an_exception_is_shown_and_keeps_state(client, place):
    failed = await client.run("kept = 5\ndef inner(): return 1 / 0\ninner()", session="errors")
    check(failed.failed, failed.text)
    includes(failed.text, "ZeroDivisionError", "in inner")
    includes((await client.run("kept", session="errors")).text, "5")
    missing = await client.run("exit 3", "bash", session="errors")
    check(missing.failed and "exit 3" in missing.text, missing.text)


async def a_syntax_error_shows_its_line(client, place):
    failed = await client.run("fine = 1\nif True\n    print(2)", session="errors")
    check(failed.failed, failed.text)
    includes(failed.text, "SyntaxError", "line 2", "if True")


async def a_timeout_keeps_state_and_teaches(client, place):
    await client.run("precious = 'still here'", session="timeout")
    late = await client.run("print('begun', flush=True)\nimport time\ntime.sleep(60)", session="timeout", timeout=1)
    check(late.failed, late.text)
    includes(late.text, "begun", "state kept", "larger timeout")
    includes((await client.run("precious", session="timeout")).text, "still here")


async def cancelling_interrupts_and_keeps_state(client, place):
    await client.run("steps = []", session="cancel")
    running = asyncio.Event()
    code = "import time\nprint('working', flush=True)\nsteps.append('begun')\ntime.sleep(60)\nsteps.append('ended')"
    arguments = {"code": code, "env": "python", "session": "cancel"}
    call = client.start("run", arguments, lambda done, message: running.set())
    await running.wait()
    await client.cancel(call)
    # Its turn comes when the interrupted one is over, which is long before its minute.
    after = await client.run("steps", session="cancel", timeout=50)
    check(not after.failed, after.text)
    includes(after.text, "['begun']")


async def progress_carries_the_newest_output(client, place):
    heard = []
    code = "import time\nfor step in range(30):\n    print('step', step, flush=True)\n    time.sleep(0.1)"
    done = await client.run(code, session="progress", progress=lambda done, message: heard.append((done, message)))
    check(not done.failed, done.text)
    check(len(heard) >= 2, heard)
    check(all("step" in message for _, message in heard), heard)
    check([done for done, _ in heard] == sorted({done for done, _ in heard}), heard)


async def other_sessions_do_not_wait(client, place):
    opened = json.loads((await client.call("sandbox_open", {"session_key": "slow"})).text)
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('went')"
    slow = client.start("run", {"code": code, "env": "python", "session": "slow", "timeout": 60})
    # Nobody else can let the slow one go: if calls waited for each other, none of these would come back.
    quick = await asyncio.gather(*(client.run(f"{n} * 2", session=f"quick{n % 2}") for n in range(4)))
    check(not slow.done(), "the slow call came back early")
    for n, one in enumerate(quick):
        includes(one.text, str(n * 2))
    await client.call("sandbox_fs_write", {"sandbox_id": opened["sandbox_id"], "path": "go", "contents": ""})
    includes((await slow).text, "went")


async def one_session_does_one_thing_at_a_time(client, place):
    await client.run("log = []", session="order")
    code = "import time\nlog.append({0})\ntime.sleep(0.05)\nlog.append({0})"
    calls = [client.start("run", {"code": code.format(n), "env": "python", "session": "order"}) for n in range(6)]
    for call in calls:
        check(not (await call).failed, "a call in the queue")
    log = json.loads((await client.run("print(log)", session="order")).text)
    check(log[0::2] == log[1::2] and sorted(log[0::2]) == list(range(6)), log)
    # Over HTTP each call has a connection of its own, and the network decides who is first.
    check(place.transport == "http" or log[0::2] == list(range(6)), log)


async def a_client_that_comes_back_finds_its_state(client, place):
    async with connect(place, "--tools", "all", name="returning") as first:
        await first.run("found = 'by the next one'", session="home")
    async with connect(place, "--tools", "all", name="returning") as second:
        includes((await second.run("found", session="home")).text, "by the next one")


async def a_call_outlives_its_client(client, place):
    if place.stateless:
        raise Skip("closing the stream is cancelling on stateless HTTP")
    async with connect(place, "--tools", "all", name="leaving") as first:
        running = asyncio.Event()
        code = "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('finished alone')"
        arguments = {"code": code, "env": "python", "session": "home", "timeout": 60}
        opened = json.loads((await first.call("sandbox_open", {"session_key": "home"})).text)
        call = first.start("run", arguments, lambda done, message: running.set())
        await running.wait()
    call.cancel()
    async with connect(place, "--tools", "all", name="leaving") as second:
        queued = asyncio.Event()
        after = {"code": "print('my turn')", "env": "python", "session": "home", "timeout": 60}
        back = second.start("run", after, lambda done, message: "waiting for" in message and queued.set())
        await queued.wait()
        write = {"sandbox_id": opened["sandbox_id"], "path": "go", "contents": ""}
        await second.call("sandbox_fs_write", write)
        text = (await back).text
        # A server that has been there all the time has nothing to tell.
        includes(text, "my turn", "still at work" if place.transport == "stdio" else "")
        template = next(template for template in await second.templates() if "/execs/" in template)
        earlier = (await second.complete(template, "exec", "", {"id": opened["sandbox_id"]}))[0]
        address = template.format(id=opened["sandbox_id"], exec=earlier)
        includes(await second.read(address), "begun", "finished alone")


async def cut_output_is_readable_as_a_resource(client, place):
    code = "for n in range(20000): print('line', n)"
    cut = await client.run(code, session="long")
    check(len(cut.text) <= 10_000, len(cut.text))
    includes(cut.text, "line 0\n", "line 19999", "left out")
    whole = await client.read(re.search(r"carrel://\S+/execs/\w+", cut.text)[0])
    check(whole.startswith("line 0\n") and whole.count("\n") >= 19_999, len(whole))
    includes(whole, "line 9999\n")


async def resources_are_listed_and_templated(client, place):
    await client.run(
        "import os\nos.makedirs('sub', exist_ok=True)\nopen('sub/a.txt', 'w').write('A')", session="listed"
    )
    resources = await client.resources()
    check("carrel://environments" in resources, resources)
    names = {environment["name"] for environment in json.loads(await client.read("carrel://environments"))}
    check({"python", "node", "bash"} <= names, names)
    home = next(uri for uri, name in resources.items() if name == "listed")
    entries = json.loads(await client.read(home))["entries"]
    check([entry["name"] for entry in entries] == ["sub"], entries)
    below = json.loads(await client.read(entries[0]["uri"]))["entries"]
    check(await client.read(below[0]["uri"]) == "A", below)
    check(len(await client.templates()) == 3, await client.templates())


async def a_changed_file_is_announced(client, place):
    made = await client.run("open('watched.txt', 'w').write('old')", session="watch")
    async with client.watching(made.links["watched.txt"]) as changed:
        await client.run("open('watched.txt', 'w').write('new')", session="watch")
        await asyncio.wait_for(changed(), 30)
    check(await client.read(made.links["watched.txt"]) == "new", "what was announced")


async def arguments_are_completed(client, place):
    files = next(template for template in await client.templates() if "/files/" in template)
    check(await client.complete(files, "env", "py") == ["python"], "env")
    await client.run("open('chapter-1.md', 'w').write('x')", session="completed-one")
    check(await client.complete(files, "session", "completed-") == ["completed-one"], "session")
    opened = json.loads((await client.call("sandbox_open", {"session_key": "completed-one"})).text)
    paths = await client.complete(files, "path", "chap", {"id": opened["sandbox_id"]})
    check(paths == ["chapter-1.md"], paths)


async def mistakes_are_explained(client, place):
    unknown = await client.run("1", "cobol")
    check(unknown.failed, unknown.text)
    includes(unknown.text, "cobol", "python", "node", "bash")
    misspelt = await client.call("run", {"code": "1", "env": "python", "sesion": "x"})
    check(misspelt.failed, misspelt.text)
    includes(misspelt.text, "sesion", "session")
    includes((await client.run("1", session="../up")).text, "session")
    gone = await client.call("sandbox_fs_list", {"sandbox_id": "sbx_" + "a" * 16})
    check(gone.failed, gone.text)


async def a_busy_session_says_so(client, place):
    running = asyncio.Event()
    code = "import time\nprint('at it', flush=True)\ntime.sleep(60)"
    call = client.start("run", {"code": code, "env": "python", "session": "busy"}, lambda *word: running.set())
    await running.wait()
    refused = await client.run("1", session="busy", timeout=1)
    check(refused.failed, refused.text)
    includes(refused.text, "busy", "python", "running for", "another session")
    includes((await client.run("echo free", "bash", session="busy")).text, "free")
    await client.cancel(call)


async def every_character_survives(client, place):
    word = "žluťoučký 🐎 — 漢字 \u202e \\ \"quoted\" 'too' \t tab"
    code = f"text = {word!r}\nprint(text)\nlen(text)"
    shown = await client.run(code, session="unicode")
    includes(shown.text, word, str(len(word)))
    large = "x" * 1_000_000 + "ü"
    counted = await client.run(f"len('''{large}''')", session="unicode")
    includes(counted.text, "1000001")


async def code_mode_goes_the_whole_way(client, place):
    async def call(tool, **arguments):
        outcome = await client.call("sandbox_" + tool, arguments)
        check(not outcome.failed, f"{tool}: {outcome.text}")
        check(json.loads(outcome.text) == outcome.structured, outcome.text)
        return outcome.structured

    box = (await call("open", session_key="code"))["sandbox_id"]
    again = await call("open", session_key="code")
    check(again["sandbox_id"] == box and not again["created"], again)
    await call(
        "fs_write", sandbox_id=box, path="src/app.py", contents="import sys\nprint(sys.argv[1].upper())", mode="0755"
    )
    refused = await client.call("sandbox_fs_write", {"sandbox_id": box, "path": "src/app.py", "contents": "x"})
    check(refused.failed and "overwrite" in refused.text, refused.text)
    await call("fs_write", sandbox_id=box, path="raw.bin", contents_b64="AP8=")
    ran = await call("exec", sandbox_id=box, cmd=["python3", "src/app.py", "loud"], cwd="/workspace")
    check((ran["stdout"], ran["exit_code"], ran["status"]) == ("LOUD\n", 0, "completed"), ran)
    listed = (await call("fs_list", sandbox_id=box, recursive=True))["entries"]
    found = {entry["path"]: entry for entry in listed}
    check(set(found) == {"src", "src/app.py", "raw.bin"}, found)
    check((found["src/app.py"]["mode"], found["raw.bin"]["size"], found["src"]["type"]) == ("0755", 2, "dir"), found)
    check((await call("fs_read", sandbox_id=box, path="raw.bin"))["contents_b64"] == "AP8=", "raw bytes")
    part = await call("fs_read", sandbox_id=box, path="src/app.py", max_bytes=6)
    check((part["contents"], part["truncated"], part["size_bytes"]) == ("import", True, 37), part)
    streamed = await call(
        "exec", sandbox_id=box, cmd=["sh", "-c", "echo one; echo two >&2; exit 4"], env={"A": "b"}, stream=True
    )
    check(streamed["status"] == "running", streamed)
    waited = await call("exec_wait", sandbox_id=box, exec_id=streamed["exec_id"], timeout_seconds=60)
    check(waited == {"done": True, "exit_code": 4}, waited)
    read = await call("exec_read", sandbox_id=box, exec_id=streamed["exec_id"])
    by_stream = {chunk["stream"]: chunk["text"] for chunk in read["chunks"]}
    check(read["done"] and by_stream == {"stdout": "one\n", "stderr": "two\n"}, read)
    rest = await call("exec_read", sandbox_id=box, exec_id=streamed["exec_id"], since_seq=read["chunks"][0]["seq"])
    check(rest["chunks"] == read["chunks"][1:], rest)
    await call("fs_delete", sandbox_id=box, path="src", recursive=True)
    check([entry["path"] for entry in (await call("fs_list", sandbox_id=box))["entries"]] == ["raw.bin"], "deleted")
    await call("close", sandbox_id=box, delete_workspace=True)
    check((await call("open", session_key="code"))["created"], "a closed sandbox is gone")


async def a_single_run_brings_its_files(client, place):
    arguments = {
        "runtime": "python",
        "code": "import os, sys, helper\nprint(helper.greet(sys.argv[1]), os.environ['MOOD'])\nsys.exit(2)",
        "files": {"helper.py": "def greet(name): return 'hello ' + name"},
        "args": ["world"],
        "env": {"MOOD": "fine"},
    }
    ran = (await client.call("sandbox_run", arguments)).structured
    check((ran["ok"], ran["exit_code"], ran["stdout"]) == (False, 2, "hello world fine\n"), ran)
    fresh = (await client.call("sandbox_run", {"runtime": "bash", "code": "ls"})).structured
    check((fresh["ok"], fresh["stdout"]) == (True, "main.sh\n"), fresh)


async def clients_meet_only_where_they_ask_to(client, place):
    # Without a connection there is nothing but the name to tell clients apart.
    twin = "other" if place.stateless else "tasks"
    await client.run("secret = 1", session="meeting")
    async with connect(place, "--tools", "all", name=twin) as other:
        includes((await other.run("'secret' in globals()", session="meeting")).text, "False")
        check("state" not in (await other.resources()).values(), "others' sandboxes are listed")
    async with connect(place, "--scope", "team", name="one") as one, connect(
        place, "--scope", "team", name="two"
    ) as two:
        await one.run("shared = 'by both'", session="meeting")
        includes((await two.run("shared", session="meeting")).text, "by both")


async def sandboxes_end_with_their_client_if_asked(client, place):
    if place.stateless:
        raise Skip("stateless HTTP has no connection that could end")
    async with connect(place, "--end-on-disconnect", name="brief") as first:
        await first.run("here = True", session="brief")
    async with connect(place, "--end-on-disconnect", name="brief") as second:
        includes((await second.run("'here' in globals()", session="brief")).text, "False")


TASKS = [
    the_tools_are_listed,
    variables_live_from_call_to_call,
    three_languages_share_one_sandbox,
    streams_and_value_are_told_apart,
    files_made_come_back_as_links,
    a_plot_comes_back_as_a_picture,
    an_exception_is_shown_and_keeps_state,
    a_syntax_error_shows_its_line,
    a_timeout_keeps_state_and_teaches,
    cancelling_interrupts_and_keeps_state,
    progress_carries_the_newest_output,
    other_sessions_do_not_wait,
    one_session_does_one_thing_at_a_time,
    a_client_that_comes_back_finds_its_state,
    a_call_outlives_its_client,
    cut_output_is_readable_as_a_resource,
    resources_are_listed_and_templated,
    a_changed_file_is_announced,
    arguments_are_completed,
    mistakes_are_explained,
    a_busy_session_says_so,
    every_character_survives,
    code_mode_goes_the_whole_way,
    a_single_run_brings_its_files,
    clients_meet_only_where_they_ask_to,
    sandboxes_end_with_their_client_if_asked,
]
