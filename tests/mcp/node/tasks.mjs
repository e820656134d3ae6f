// What people do with the server, each as one task. `python/tasks.py` has the same ones: keep both alike.

import { deepStrictEqual as same, ok } from 'node:assert/strict';

import { connected } from './connect.mjs';

/** What the task needs is not here. */
export class Skip extends Error {}

const ALL = ['--tools', 'all'];
const EXEC = /carrel:\/\/\S+\/execs\/\w+/;

const includes = (text, ...words) => {
  for (const word of words) ok(text.includes(word), `${JSON.stringify(word)} is not in: ${text.slice(0, 2000)}`);
};
/** A promise and what fulfils it. */
const event = () => {
  let happen;
  const happened = new Promise((done) => (happen = done));
  return { happen, happened };
};

async function the_tools_are_listed(client) {
  const tools = Object.fromEntries((await client.tools()).map((tool) => [tool.name, tool]));
  same(Object.keys(tools).length, 13);
  same(tools.run.inputSchema.required, ['code', 'env']);
  ok(tools.sandbox_fs_read.annotations.readOnlyHint && tools.run.annotations.destructiveHint);
}

async function variables_live_from_call_to_call(client) {
  const session = 'state';
  await client.run('import math\nradius = 3\ndef area(): return math.pi * radius ** 2', 'python', { session });
  includes((await client.run('round(area(), 4)', 'python', { session })).text, '28.2743');
  await client.run('const { sqrt } = Math; var seen = [sqrt(16)];', 'node', { session });
  includes((await client.run('seen.push(5); seen', 'node', { session })).text, '4', '5');
}

async function three_languages_share_one_sandbox(client) {
  const session = 'mixed';
  await client.run("open('numbers.txt', 'w').write('3\\n1\\n2\\n')", 'python', { session });
  await client.run('sort numbers.txt > sorted.txt; export SEEN=yes', 'bash', { session });
  const node = "require('fs').readFileSync('sorted.txt', 'utf8').split('\\n').join('-')";
  includes((await client.run(node, 'node', { session })).text, '1-2-3-');
  includes((await client.run('echo $SEEN; cat sorted.txt', 'bash', { session })).text, 'yes\n1\n2\n3');
}

async function streams_and_value_are_told_apart(client) {
  const code = "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\n6 * 7";
  const { text } = await client.run(code, 'python', { session: 'streams' });
  const at = ['to out', 'stderr:\nto err', 'value:\n42'].map((word) => text.indexOf(word));
  ok(at[0] >= 0 && at[0] < at[1] && at[1] < at[2], text);
}

async function files_made_come_back_as_links(client) {
  const session = 'files';
  const code = "open('report ü.md', 'w').write('# Ünïcode')\nopen('all.bin', 'wb').write(bytes(range(256)) * 4)";
  const made = await client.run(code, 'python', { session });
  same(Object.keys(made.links).sort(), ['all.bin', 'report ü.md']);
  same(await client.read(made.links['report ü.md']), '# Ünïcode');
  const bytes = Buffer.from(Array.from({ length: 1024 }, (_, at) => at % 256));
  ok(bytes.equals(await client.read(made.links['all.bin'])));
  same((await client.run("print('nothing written')", 'python', { session })).links, {});
}

async function a_plot_comes_back_as_a_picture(client) {
  const session = 'plot';
  if ((await client.run('import matplotlib, PIL', 'python', { session })).failed) {
    throw new Skip("no matplotlib in the sandbox's python");
  }
  const code = 'import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.show()';
  const shown = await client.run(code, 'python', { session, timeout: 80 });
  same(shown.images.length, 1, shown.text);
  const [{ mime, data }] = shown.images;
  ok(mime === 'image/png' && data.subarray(1, 4).toString() === 'PNG' && data.length > 2000, `${mime} ${data.length}`);
}

async function an_exception_is_shown_and_keeps_state(client) {
  const session = 'errors';
  const failed = await client.run('kept = 5\ndef inner(): return 1 / 0\ninner()', 'python', { session });
  ok(failed.failed);
  includes(failed.text, 'ZeroDivisionError', 'in inner');
  includes((await client.run('kept', 'python', { session })).text, '5');
  const left = await client.run('exit 3', 'bash', { session });
  ok(left.failed && left.text.includes('exit 3'), left.text);
}

async function a_syntax_error_shows_its_line(client) {
  const failed = await client.run('fine = 1\nif True\n    print(2)', 'python', { session: 'errors' });
  ok(failed.failed);
  includes(failed.text, 'SyntaxError', 'line 2', 'if True');
}

async function a_timeout_keeps_state_and_teaches(client) {
  const session = 'timeout';
  await client.run("precious = 'still here'", 'python', { session });
  const code = "print('begun', flush=True)\nimport time\ntime.sleep(60)";
  const late = await client.run(code, 'python', { session, timeout: 1 });
  ok(late.failed);
  includes(late.text, 'begun', 'state kept', 'larger timeout');
  includes((await client.run('precious', 'python', { session })).text, 'still here');
}

async function cancelling_interrupts_and_keeps_state(client) {
  const session = 'cancel';
  await client.run('steps = []', 'python', { session });
  const { happen, happened } = event();
  const code = "import time\nprint('working', flush=True)\nsteps.append('begun')\ntime.sleep(60)\nsteps.append('ended')";
  const call = client.start('run', { code, env: 'python', session }, happen);
  await happened;
  await client.cancel(call);
  // Its turn comes when the interrupted one is over, which is long before its minute.
  const after = await client.run('steps', 'python', { session, timeout: 50 });
  ok(!after.failed, after.text);
  includes(after.text, "['begun']");
}

async function progress_carries_the_newest_output(client) {
  const heard = [];
  const code = "import time\nfor step in range(30):\n    print('step', step, flush=True)\n    time.sleep(0.1)";
  const done = await client.run(code, 'python', { session: 'progress', progress: (word) => heard.push(word) });
  ok(!done.failed, done.text);
  ok(heard.length >= 2 && heard.every(({ message }) => message.includes('step')), JSON.stringify(heard));
  ok(heard.every(({ progress }, at) => at === 0 || progress > heard[at - 1].progress), JSON.stringify(heard));
}

async function other_sessions_do_not_wait(client) {
  const { sandbox_id } = (await client.call('sandbox_open', { session_key: 'slow' })).structured;
  const code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('went')";
  const slow = client.start('run', { code, env: 'python', session: 'slow', timeout: 60 });
  // Nobody else can let the slow one go: if calls waited for each other, none of these would come back.
  const quick = [0, 1, 2, 3].map((n) => client.run(`${n} * 2`, 'python', { session: `quick${n % 2}` }));
  (await Promise.all(quick)).forEach(({ text }, n) => includes(text, String(n * 2)));
  ok(!slow.ended, 'the slow call came back early');
  await client.call('sandbox_fs_write', { sandbox_id, path: 'go', contents: '' });
  includes((await slow.outcome).text, 'went');
}

async function one_session_does_one_thing_at_a_time(client, place) {
  const session = 'order';
  await client.run('log = []', 'python', { session });
  const all = [0, 1, 2, 3, 4, 5];
  const code = (n) => `import time\nlog.append(${n})\ntime.sleep(0.05)\nlog.append(${n})`;
  const calls = await Promise.all(all.map((n) => client.run(code(n), 'python', { session })));
  ok(calls.every((call) => !call.failed));
  const log = JSON.parse((await client.run('print(log)', 'python', { session })).text);
  const begun = log.filter((_, at) => at % 2 === 0);
  same(begun, log.filter((_, at) => at % 2 === 1));
  // Over HTTP each call has a connection of its own, and the network decides who is first.
  same(place.transport === 'http' ? begun.sort() : begun, all);
}

async function a_client_that_comes_back_finds_its_state(client, place) {
  const session = 'home';
  const as = 'returning';
  await connected(place, ALL, { as }, (first) => first.run("found = 'by the next one'", 'python', { session }));
  const again = await connected(place, ALL, { as }, (second) => second.run('found', 'python', { session }));
  includes(again.text, 'by the next one');
}

async function a_call_outlives_its_client(client, place) {
  if (place.stateless) throw new Skip('closing the stream is cancelling on stateless HTTP');
  const as = 'leaving';
  const session = 'home';
  const { happen, happened } = event();
  const id = await connected(place, ALL, { as }, async (first) => {
    const { sandbox_id } = (await first.call('sandbox_open', { session_key: session })).structured;
    const code =
      "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('finished alone')";
    first.start('run', { code, env: 'python', session, timeout: 60 }, happen);
    await happened;
    return sandbox_id;
  });
  await connected(place, ALL, { as }, async (second) => {
    const queued = event();
    const progress = ({ message }) => message.includes('waiting for') && queued.happen();
    const back = second.run("print('my turn')", 'python', { session, timeout: 60, progress });
    await queued.happened;
    await second.call('sandbox_fs_write', { sandbox_id: id, path: 'go', contents: '' });
    // A server that has been there all the time has nothing to tell.
    includes((await back).text, 'my turn', place.transport === 'stdio' ? 'still at work' : '');
    const template = (await second.templates()).find((template) => template.includes('/execs/'));
    const [earlier] = await second.complete(template, 'exec', '', { id });
    includes(await second.read(template.replace('{id}', id).replace('{exec}', earlier)), 'begun', 'finished alone');
  });
}

async function cut_output_is_readable_as_a_resource(client) {
  const cut = await client.run("for n in range(20000): print('line', n)", 'python', { session: 'long' });
  ok(cut.text.length <= 10_000, String(cut.text.length));
  includes(cut.text, 'line 0\n', 'line 19999', 'left out');
  const whole = await client.read(EXEC.exec(cut.text)[0]);
  ok(whole.startsWith('line 0\n') && whole.split('\n').length >= 20_000, String(whole.length));
  includes(whole, 'line 9999\n');
}

async function resources_are_listed_and_templated(client) {
  const code = "import os\nos.makedirs('sub', exist_ok=True)\nopen('sub/a.txt', 'w').write('A')";
  await client.run(code, 'python', { session: 'listed' });
  const resources = await client.resources();
  const environments = JSON.parse(await client.read('carrel://environments')).map(({ name }) => name);
  ok(['python', 'node', 'bash'].every((name) => environments.includes(name)), String(environments));
  const home = Object.keys(resources).find((uri) => resources[uri] === 'listed');
  const { entries } = JSON.parse(await client.read(home));
  same(entries.map(({ name }) => name), ['sub']);
  const below = JSON.parse(await client.read(entries[0].uri)).entries;
  same(await client.read(below[0].uri), 'A');
  same((await client.templates()).length, 3);
}

async function a_changed_file_is_announced(client) {
  const session = 'watch';
  const made = await client.run("open('watched.txt', 'w').write('old')", 'python', { session });
  const uri = made.links['watched.txt'];
  await client.watching(uri, async (changed) => {
    await client.run("open('watched.txt', 'w').write('new')", 'python', { session });
    same((await changed()).params.uri, uri);
  });
  same(await client.read(uri), 'new');
}

async function arguments_are_completed(client) {
  const session = 'completed-one';
  const files = (await client.templates()).find((template) => template.includes('/files/'));
  same(await client.complete(files, 'env', 'py'), ['python']);
  await client.run("open('chapter-1.md', 'w').write('x')", 'python', { session });
  same(await client.complete(files, 'session', 'completed-'), [session]);
  const { sandbox_id } = (await client.call('sandbox_open', { session_key: session })).structured;
  same(await client.complete(files, 'path', 'chap', { id: sandbox_id }), ['chapter-1.md']);
}

async function mistakes_are_explained(client) {
  const unknown = await client.run('1', 'cobol');
  ok(unknown.failed);
  includes(unknown.text, 'cobol', 'python', 'node', 'bash');
  const misspelt = await client.call('run', { code: '1', env: 'python', sesion: 'x' });
  ok(misspelt.failed);
  includes(misspelt.text, 'sesion', 'session');
  includes((await client.run('1', 'python', { session: '../up' })).text, 'session');
  ok((await client.call('sandbox_fs_list', { sandbox_id: `sbx_${'a'.repeat(16)}` })).failed);
}

async function a_busy_session_says_so(client) {
  const session = 'busy';
  const { happen, happened } = event();
  const code = "import time\nprint('at it', flush=True)\ntime.sleep(60)";
  const call = client.start('run', { code, env: 'python', session }, happen);
  await happened;
  const refused = await client.run('1', 'python', { session, timeout: 1 });
  ok(refused.failed);
  includes(refused.text, 'busy', 'python', 'running for', 'another session');
  includes((await client.run('echo free', 'bash', { session })).text, 'free');
  await client.cancel(call);
}

async function every_character_survives(client) {
  const session = 'unicode';
  const word = 'žluťoučký 🐎 — 漢字 \u202e \\ "quoted" \'too\' \t tab';
  const shown = await client.run(`console.log(${JSON.stringify(word)}); [...${JSON.stringify(word)}].length`, 'node', { session });
  includes(shown.text, word, String([...word].length));
  const large = 'x'.repeat(1_000_000) + 'ü';
  includes((await client.run(`len('''${large}''')`, 'python', { session })).text, '1000001');
}

async function code_mode_goes_the_whole_way(client) {
  const call = async (tool, words) => {
    const outcome = await client.call(`sandbox_${tool}`, words);
    ok(!outcome.failed, `${tool}: ${outcome.text}`);
    same(JSON.parse(outcome.text), outcome.structured);
    return outcome.structured;
  };
  const { sandbox_id } = await call('open', { session_key: 'code' });
  const again = await call('open', { session_key: 'code' });
  ok(again.sandbox_id === sandbox_id && !again.created);
  const app = { sandbox_id, path: 'src/app.py', contents: 'import sys\nprint(sys.argv[1].upper())', mode: '0755' };
  await call('fs_write', app);
  const refused = await client.call('sandbox_fs_write', app);
  ok(refused.failed && refused.text.includes('overwrite'), refused.text);
  await call('fs_write', { sandbox_id, path: 'raw.bin', contents_b64: 'AP8=' });
  const ran = await call('exec', { sandbox_id, cmd: ['python3', 'src/app.py', 'loud'], cwd: '/workspace' });
  same([ran.stdout, ran.exit_code, ran.status], ['LOUD\n', 0, 'completed']);
  const listed = (await call('fs_list', { sandbox_id, recursive: true })).entries;
  const found = Object.fromEntries(listed.map((entry) => [entry.path, entry]));
  same(Object.keys(found).sort(), ['raw.bin', 'src', 'src/app.py']);
  same([found['src/app.py'].mode, found['raw.bin'].size, found.src.type], ['0755', 2, 'dir']);
  same((await call('fs_read', { sandbox_id, path: 'raw.bin' })).contents_b64, 'AP8=');
  const part = await call('fs_read', { sandbox_id, path: 'src/app.py', max_bytes: 6 });
  same([part.contents, part.truncated, part.size_bytes], ['import', true, 37]);
  const cmd = ['sh', '-c', 'echo one; echo two >&2; exit 4'];
  const { exec_id, status } = await call('exec', { sandbox_id, cmd, env: { A: 'b' }, stream: true });
  same(status, 'running');
  same(await call('exec_wait', { sandbox_id, exec_id, timeout_seconds: 60 }), { done: true, exit_code: 4 });
  const read = await call('exec_read', { sandbox_id, exec_id });
  const streams = Object.fromEntries(read.chunks.map(({ stream, text }) => [stream, text]));
  ok(read.done);
  same(streams, { stdout: 'one\n', stderr: 'two\n' });
  const rest = await call('exec_read', { sandbox_id, exec_id, since_seq: read.chunks[0].seq });
  same(rest.chunks, read.chunks.slice(1));
  await call('fs_delete', { sandbox_id, path: 'src', recursive: true });
  same((await call('fs_list', { sandbox_id })).entries.map(({ path }) => path), ['raw.bin']);
  await call('close', { sandbox_id, delete_workspace: true });
  ok((await call('open', { session_key: 'code' })).created, 'a closed sandbox is gone');
}

async function a_single_run_brings_its_files(client) {
  const code = 'const { greet } = require("./helper.js"); console.log(greet(process.argv[2]), process.env.MOOD); process.exit(2)';
  const files = { 'helper.js': 'exports.greet = (name) => "hello " + name' };
  const words = { runtime: 'node', code, files, args: ['world'], env: { MOOD: 'fine' } };
  const ran = (await client.call('sandbox_run', words)).structured;
  same([ran.ok, ran.exit_code, ran.stdout], [false, 2, 'hello world fine\n']);
  const fresh = (await client.call('sandbox_run', { runtime: 'bash', code: 'ls' })).structured;
  same([fresh.ok, fresh.stdout], [true, 'main.sh\n']);
}

async function clients_meet_only_where_they_ask_to(client, place) {
  const session = 'meeting';
  // Without a connection there is nothing but the name to tell clients apart.
  const twin = place.stateless ? 'other' : 'tasks';
  await client.run('secret = 1', 'python', { session });
  await connected(place, ALL, { as: twin }, async (other) => {
    includes((await other.run("'secret' in globals()", 'python', { session })).text, 'False');
    ok(!Object.values(await other.resources()).includes('state'), "others' sandboxes are listed");
  });
  const team = ['--scope', 'team'];
  await connected(place, team, { as: 'one' }, (one) =>
    connected(place, team, { as: 'two' }, async (two) => {
      await one.run("shared = 'by both'", 'python', { session });
      includes((await two.run('shared', 'python', { session })).text, 'by both');
    }),
  );
}

async function sandboxes_end_with_their_client_if_asked(client, place) {
  if (place.stateless) throw new Skip('stateless HTTP has no connection that could end');
  const session = 'brief';
  const ending = ['--end-on-disconnect'];
  const as = 'brief';
  await connected(place, ending, { as, farewell: true }, (first) => first.run('here = True', 'python', { session }));
  const after = await connected(place, ending, { as }, (second) =>
    second.run("'here' in globals()", 'python', { session }),
  );
  includes(after.text, 'False');
}

export const TASKS = [
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
];
