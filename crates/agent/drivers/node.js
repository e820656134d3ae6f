// The node driver: keeps one JavaScript session and runs the calls the agent sends (docs/drivers.md).
//
// Code is evaluated by V8 itself through an in-process inspector session: `Runtime.evaluate` in its REPL mode
// knows top-level await and re-declaration, keeps real `let` scopes and needs no parser of ours. Three things
// it does not do are done here by a scan over tokens (`rewrite`): `import()`, `import` statements, and a name
// that changes its kind (`let x` over `function x`).
//
// Invariants: one call runs at a time; every request gets exactly one `done`; nothing but this file writes to
// the control pipe. Deliberately absent: threads, npm packages, command-line flags, buffering of output.
'use strict';

const fs = require('fs');
// What user code could replace under our feet is taken now, before it runs.
const { writeSync, readSync, openSync, closeSync, fstatSync, readFileSync, readdirSync } = fs;
const { parse, stringify } = JSON;
const { kill, pid, cwd, reallyExit, _tickCallback: drainMicrotasks } = process;
const { apply, ownKeys, getOwnPropertyDescriptor, getPrototypeOf } = Reflect;
const { isArray } = Array;
const { wait } = Atomics;
let nativeRandom = Math.random;
const later = setImmediate;
const startPolling = setInterval;
const stopPolling = clearInterval;

const MAX_TEXT = 1 << 20; // characters of one shown value; more helps no reader
const MAX_REPLY = 31 << 20; // the contract allows 32 MiB in a line
const SIGINT_POLL_MS = 20; // how late an `await` may notice SIGINT
const SETTLE_TRIES = 1000; // looks, a millisecond apart, at a thread that is to hear a signal: it is late, not gone
const HEARD_MS = 1000; // how long a signal of our own may take to terminate us
const FLUSH_MS = 5; // for what an interrupted call has queued: enough for code that only tidies up
const FLUSHES = 100; // so often: each ends at least one function
const END_OF_FILE = -4095; // as libuv reports it
const EXIT_CONTROL_LOST = 70; // EX_SOFTWARE: the agent's pipe is gone without an end of file
const IMPORT = 'ımport'; // stands for `import` in `import(…)`: as long, so that columns stay true

const { O_RDONLY, O_WRONLY } = fs.constants;
const control = { input: reopen(3, O_RDONLY), output: reopen(4, O_WRONLY) };
const standard = [keep(0, O_RDONLY), keep(1, O_WRONLY), keep(2, O_WRONLY)];
const sigint = takeSigint();
send(`{"ready":{"version":${stringify(process.versions.node)}}}`);

// Everything below is loaded after `ready`: the agent need not wait for it.
const vm = require('vm');
const path = require('path');
const Module = require('module');
const { inspect, types: utilTypes } = require('util');
const { isNativeError, isProxy, isMap, isSet, isTypedArray, isArrayBuffer } = utilTypes;
const session = openSession();

const DISPLAY = Symbol.for('Jupyter.display');
const EXIT = Symbol('process.exit'); // thrown where the running code cannot be terminated
const INTERRUPT = Symbol('interrupt'); // thrown to let node tidy up after a termination
const queue = { first: null, last: null }; // requests that wait for their turn
let call = null; // the running call: { id, code, guarded, interrupted, exit, over, sealed, poll, outcome }

// ---- control pipe and descriptors -----------------------------------------------------------------------

// A second, close-on-exec descriptor for the same pipe, so that child processes do not inherit the original.
function reopen(fd, flags) {
  try {
    const copy = openSync(`/proc/self/fd/${fd}`, flags);
    closeSync(fd);
    return copy;
  } catch {
    return fd; // no /proc, or a pipe of another user: the original still works
  }
}

function keep(fd, flags) {
  try {
    const copy = openSync(`/proc/self/fd/${fd}`, flags);
    const { dev, ino } = fstatSync(fd);
    return { copy, flags, dev, ino };
  } catch {
    return null;
  }
}

// Node has no dup2, but open() takes the lowest free number: closed in order, reopened in order.
function restoreDescriptors() {
  for (let fd = 0; fd < 3; fd++) {
    const kept = standard[fd];
    if (kept === null || isStill(fd, kept)) continue;
    try { closeSync(fd); } catch { /* it was closed already */ }
    try { openSync(`/proc/self/fd/${kept.copy}`, kept.flags); } catch { /* the copy was closed too */ }
  }
}

function isStill(fd, kept) {
  try {
    const now = fstatSync(fd);
    return now.ino === kept.ino && now.dev === kept.dev;
  } catch {
    return false;
  }
}

// Writes all of it, also when a child process made the shared pipe non-blocking.
function writeFully(fd, data) {
  const bytes = typeof data === 'string' ? Buffer.from(data) : data;
  for (let done = 0; done < bytes.length;) {
    try {
      done += writeSync(fd, bytes, done, bytes.length - done);
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error;
      pause(1);
    }
  }
}

// A termination ends it early.
function pause(ms) {
  wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
}

function send(line) {
  try {
    writeFully(control.output, `${line}\n`);
  } catch {
    apply(reallyExit, process, [EXIT_CONTROL_LOST]);
  }
}

function complain(text) {
  try { writeFully(2, text); } catch { /* nobody reads: the reply still says what happened */ }
}

// Node's `inspector` module takes longer to load than everything else here; what it wraps is enough.
function openSession() {
  let Connection = null;
  try { ({ Connection } = process.binding('inspector')); } catch { /* not in this node */ }
  if (typeof Connection !== 'function') {
    const session = new (require('inspector').Session)();
    session.connect();
    return session;
  }
  const waiting = { __proto__: null };
  let last = 0;
  const connection = new Connection((message) => {
    const { id, result, error } = parse(message);
    const callback = waiting[id];
    if (callback === undefined) return;
    delete waiting[id];
    try {
      if (error) callback(new Error(`Inspector error ${error.code}: ${error.message}`));
      else callback(null, result);
    } catch (problem) { // must not run into V8's own code
      process.emitWarning(problem);
    }
  });
  const post = (method, params, callback) => {
    last += 1;
    if (callback) waiting[last] = callback;
    // Without a prototype: no `toJSON` of the user's is asked.
    connection.dispatch(stringify({ __proto__: null, id: last, method, params }));
  };
  return { post };
}

// ---- a call from request to done ------------------------------------------------------------------------

function runNext(mayGuardLoop) {
  while (call === null && queue.first !== null && queue.first.request.brief !== undefined) {
    const { id, brief } = queue.first.request;
    queue.first = queue.first.next;
    tellBrief(id, brief);
  }
  if (call !== null || queue.first === null) return;
  const { id, code, env, after_interrupt: afterInterrupt, reseed } = queue.first.request;
  queue.first = queue.first.next;
  call = { id, code, guarded: false, interrupted: false, exit: null, over: false, sealed: false, poll: null, outcome: null };
  followWorkingDirectory();
  delete Object.prototype.toJSON; // it would garble the messages that node's inspector module writes
  process.exitCode = undefined;
  if (env !== undefined) changeEnvironment(env);
  if (reseed) reseedGenerators();
  if (afterInterrupt) sigint.settle();
  sigint.take(); // a SIGINT from before the call is not meant for it
  run(call, code, mayGuardLoop);
}

// What the session's variables have become since the last request.
function changeEnvironment(changes) {
  const names = ownKeys(changes);
  for (let at = 0; at < names.length; at++) {
    const name = names[at];
    try {
      if (changes[name] === null) delete process.env[name];
      else process.env[name] = changes[name];
    } catch { /* user code has put something of its own there */ }
  }
}

// This process has come back from disk, and another one may have done so as well: not with the same numbers.
function reseedGenerators() {
  try { stirMath(); } catch { /* another node, or user code has put something of its own there */ }
  try { stirOpenssl(); } catch { /* the same */ }
}

// V8 seeds `Math.random` once per realm and offers no way to do it again, so that of a new realm takes its place. One that user
// code has put there stays. Whoever kept the old function gets its numbers from another place in their order.
function stirMath() {
  const entropy = fromSystem(8);
  for (let left = entropy.readUInt16LE(4); left > 0; left--) nativeRandom();
  if (Math.random !== nativeRandom) return;
  const v8 = require('v8');
  v8.setFlagsFromString(`--random-seed=${(entropy.readUInt32LE(0) >>> 1) || 1}`);
  const random = vm.runInNewContext('Math.random(); Math.random');
  v8.setFlagsFromString('--random-seed=0');
  Math.random = nativeRandom = Object.setPrototypeOf(random, Function.prototype);
}

// OpenSSL seeds its generators anew in a process with another pid, which this one does not have, and node has no call that
// does. But what a generator becomes depends on how much it has just given: amounts drawn from the system's own numbers
// are as good as a seed. There is one for numbers and one for keys, and of each one per thread. Node's own threads, which serve
// calls with a callback, are given something to do; which of them takes it cannot be said, so one may be passed over. Then what
// node has in store of the old numbers is used up.
const TURNS = 11; // of twelve bits each
const POOL_TURNS = 32; // for four threads
const KEYS = 32; // of one bit each: the two kinds take different amounts
const BLOCK = 16; // bytes that a generator makes at a time
const STORED_UUIDS = 128;
const STORED_INTEGERS = 1024;
function stirOpenssl() {
  if (!process.moduleLoadList.includes('NativeModule internal/crypto/random')) return;
  const { randomBytes, randomUUID, randomInt, generateKeyPairSync } = require('crypto');
  const entropy = fromSystem(2 * (TURNS + POOL_TURNS) + KEYS);
  const amount = (turn) => BLOCK * (1 + (entropy.readUInt16LE(2 * turn) & 0xfff));
  for (let turn = 0; turn < TURNS; turn++) randomBytes(amount(turn));
  for (let turn = TURNS; turn < TURNS + POOL_TURNS; turn++) randomBytes(amount(turn), () => {});
  for (let left = STORED_UUIDS; left > 0; left--) randomUUID();
  for (let left = STORED_INTEGERS; left > 0; left--) randomInt(2);
  for (let at = entropy.length - KEYS; at < entropy.length; at++) generateKeyPairSync(entropy[at] & 1 ? 'x25519' : 'x448');
}

function fromSystem(count) {
  const bytes = Buffer.alloc(count);
  const device = openSync('/dev/urandom', O_RDONLY);
  try {
    for (let done = 0; done < count;) done += readSync(device, bytes, done, count - done, null);
  } finally {
    closeSync(device);
  }
  return bytes;
}

function run(mine, code, mayGuardLoop) {
  let source = asExpression(code);
  try {
    source = rewrite(source, []);
  } catch { /* not our grammar: V8 says what is wrong */ }
  const interrupted = evaluate(mine, source, code, []);
  if (mine.over && !interrupted) return seal(mine);
  if (interrupted) endQueues(mine);
  if (mine.over) later(() => seal(mine)); // decided, then interrupted before the guard's end
  if (!mine.over) {
    mine.poll = startPolling(() => sigint.take() && interrupt(mine), SIGINT_POLL_MS);
    if (mayGuardLoop && loop === null) guardLoop();
    if (loop !== null) loop.alwaysTick();
  }
  // Node clears its stack of async contexts only after an uncaught exception; a termination left it as it was.
  if (interrupted) throw INTERRUPT;
}

// Runs one attempt; a name that changes its kind makes another one, before any of the code ran.
function evaluate(mine, source, code, flips) {
  let again = null;
  let synchronous = true;
  let broken = null;
  const parameters = {
    expression: `${source}\n//# sourceURL=<call-${mine.id}>`, replMode: true, objectGroup: 'carrel', userGesture: false,
  };
  const interrupted = guard(mine, () => {
    session.post('Runtime.evaluate', parameters, (failure, reply) => {
      if (failure) { broken = failure; return; }
      const details = reply.exceptionDetails;
      const compiled = !(synchronous && details);
      if (!compiled) again = flipped(code, details, flips);
      if (again !== null) return;
      try {
        receive(mine, reply, compiled);
      } catch (error) { // ours, or of a prototype that user code replaced: the call ends all the same
        finish(mine, { name: 'DriverError', message: `${error}` }, 1);
      }
    });
    synchronous = false;
    drainMicrotasks();
  });
  if (interrupted) interrupt(mine);
  else if (broken !== null) fail(mine, broken, null);
  else if (again !== null) return evaluate(mine, again, code, flips);
  return interrupted;
}

// The value itself, not the inspector's picture of it, by way of a function whose `this` takes it.
const RECEIVER = Symbol.for('carrel.receiver');
const receiver = { take: null };
const receiverId = remoteOf(receiver);
let remembered = false; // whether the inspector holds an object for us
function valueOf(remote) {
  if (!remote.objectId && !('unserializableValue' in remote)) return remote.subtype === 'null' ? null : remote.value;
  let value;
  remembered = true;
  receiver.take = (it) => { value = it; };
  const argument = remote.objectId ? { objectId: remote.objectId } : { unserializableValue: remote.unserializableValue };
  session.post('Runtime.callFunctionOn', {
    functionDeclaration: 'function (it) { this.take(it) }', objectId: receiverId, arguments: [argument],
  });
  return value;
}

// The inspector's name for an object of ours.
function remoteOf(object) {
  const name = RECEIVER;
  let id;
  globalThis[name] = object;
  session.post('Runtime.evaluate', { expression: "globalThis[Symbol.for('carrel.receiver')]" }, (_, reply) => {
    id = reply.result.objectId;
  });
  delete globalThis[name];
  return id;
}

function receive(mine, { result, exceptionDetails }, compiled) {
  if (mine.over) return;
  if (exceptionDetails) {
    const error = valueOf(exceptionDetails.exception || result);
    return fail(mine, error, compiled ? null : exceptionDetails);
  }
  const value = valueOf(result);
  underscore.set('_', value);
  if (value === undefined) return finish(mine, null);
  show(mine, 'result', value, () => finish(mine, null));
}

function fail(mine, error, position) {
  if (mine.over || error === EXIT) return;
  underscore.set('_error', error);
  complain(traceback(mine, error, position));
  finish(mine, describe(error), 1);
}

function interrupt(mine) {
  mine.interrupted = true;
  if (mine.over) return;
  if (mine.exit !== null) return finish(mine, null, mine.exit);
  complain('Interrupted\n');
  finish(mine, { name: 'Interrupted', message: 'the call was interrupted by SIGINT' }, 130);
}

// The call is decided. Its `done` waits for the end of the event loop's turn (`run` seals at the guard's end,
// which is one), so that a rejection nobody handled in this turn still counts to it.
function finish(mine, error, exit) {
  mine.over = true;
  mine.outcome = { error, exit };
  if (!mine.guarded) later(() => seal(mine));
}

function seal(mine) {
  if (mine.sealed) return;
  mine.sealed = true;
  if (mine.poll) stopPolling(mine.poll);
  let { error, exit } = mine.outcome;
  if (exit === undefined) exit = exitCode(process.exitCode);
  process.exitCode = undefined;
  forget(mine.id);
  restoreDescriptors();
  const told = error && `{"name":${stringify(error.name)},"message":${stringify(error.message)}}`;
  send(`{"id":${mine.id},"done":{"exit":${exit},"error":${told}}}`);
  call = null;
  later(() => runNext(false));
}

// The inspector holds on to results and to what console.log was given; each message costs it some 20 µs.
function forget(id) {
  if (remembered) session.post('Runtime.releaseObjectGroup', { objectGroup: 'carrel' });
  if (remembered || id % 16 === 0) session.post('Runtime.discardConsoleEntries');
  remembered = false;
}

// Errors in timers and callbacks and rejections nobody handled: the running call's, if there is one.
process.setUncaughtExceptionCaptureCallback((error) => {
  if (error === EXIT || error === INTERRUPT) return;
  if (process.listenerCount('uncaughtException') > 0) {
    process.emit('uncaughtException', error, 'uncaughtException');
  } else if (call === null) {
    complain(traceback(null, error, null));
  } else if (!call.over) {
    fail(call, error, null);
  } else if (!call.sealed && !call.outcome.error && call.outcome.exit === undefined) {
    complain(traceback(call, error, null));
    call.outcome = { error: describe(error), exit: 1 };
  } else {
    complain(traceback(null, error, null));
  }
});

// ---- interruption and process.exit ----------------------------------------------------------------------

// Node's own SIGINT watchdog thread, held for the process's whole life: it terminates code that runs under
// `breakOnSigint`, remembers a signal otherwise, and there is no moment at which SIGINT would kill us. Listeners
// for SIGINT are kept away from libuv, which would take the signal from it.
function takeSigint() {
  const { startSigintWatchdog, stopSigintWatchdog } = process.binding('contextify');
  const placeholder = () => {};
  process.on('SIGINT', placeholder); // else `process.kill(process.pid, 'SIGINT')` runs node's clean-up for its end
  const others = threads();
  startSigintWatchdog();
  const watchdog = threads().find((thread) => !others.includes(thread));
  for (const name of ['newListener', 'removeListener']) {
    const original = process.listeners(name).find((listener) => /IfSignal$/.test(listener.name));
    if (!original) continue;
    process.removeListener(name, original);
    process.on(name, (type) => { if (type !== 'SIGINT') original(type); });
  }
  process.removeListener('SIGINT', placeholder);
  return {
    take: () => { startSigintWatchdog(); return stopSigintWatchdog(); },
    settle: () => { for (let left = SETTLE_TRIES; left > 0 && !isIdle(watchdog); left--) pause(1); },
  };
}

function threads() {
  try { return readdirSync('/proc/self/task'); } catch { return []; } // no /proc
}

// Whether every SIGINT sent to us up to now has come to that thread, and the thread is back asleep: a signal first waits
// for the process (ShdPnd), and the thread that it wakes counts as running from that moment on.
function isIdle(thread) {
  try {
    const status = readFileSync(`/proc/self/task/${thread}/status`, 'latin1');
    return /^State:\tS/m.test(status) && !/^ShdPnd:\t[0-9a-f]*[2367abef]$/m.test(status);
  } catch {
    return true; // nothing is known of it
  }
}

// Runs `body` so that SIGINT terminates it, even in an endless loop; tells whether that happened.
let guarded = null; // { mine, body }
const INTERRUPTED = Symbol('interrupted'); // thrown in place of code that was to begin after its interrupt
Object.defineProperty(globalThis, '__carrel_guarded', {
  value: () => {
    const { mine, body } = guarded;
    if (sigint.take() && mine !== NOBODY) throw INTERRUPTED; // heard just before the guard was up
    body();
  },
});
const guardScript = new vm.Script('__carrel_guarded()', { filename: __filename });
const runInThisContext = vm.Script.prototype.runInThisContext;
const breakOnSigint = { breakOnSigint: true, displayErrors: false };
const briefly = { breakOnSigint: true, displayErrors: false, timeout: FLUSH_MS };
function guard(mine, body, how = breakOnSigint) {
  guarded = { mine, body };
  mine.guarded = true;
  try {
    apply(runInThisContext, guardScript, [how]);
    return false;
  } catch (error) {
    if (error === INTERRUPTED) return true;
    const code = error && error.code;
    if (code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED' || (how === briefly && code === 'ERR_SCRIPT_EXECUTION_TIMEOUT')) return true;
    fail(mine, error, null);
    return false;
  } finally {
    mine.guarded = false;
  }
}

// What an interrupted call had queued (`then`, nextTick) would run after it, where nothing can interrupt it. It runs now
// and is given little time: V8 drops the rest of a queue in which it was terminated, node goes on with its own.
function endQueues(mine) {
  let empty = false;
  for (let left = FLUSHES; !empty && left > 0; left--) guard(mine, () => { drainMicrotasks(); empty = true; }, briefly);
}

// What runs after an `await` or in a timer is called by node's event loop, not by `evaluate`. From the first call on that
// waits for something, the loop's own entries into such code are guarded too: timers, and the queue behind every callback.
// They are found in a closure of node's, where the inspector can look. Between calls a timer that never ends is all that
// a signal can hit: one for the call that waits behind it. Not covered: the synchronous part of other callbacks (of a
// socket, a file, setImmediate, whose state a termination would garble). Where node is built differently, only the
// `await` itself is interruptible.
let loop = null; // once guarded: { alwaysTick }
const NOBODY = { guarded: false, interrupted: false, over: true, sealed: true }; // between calls
function guardLoop() {
  loop = { alwaysTick() {} };
  try {
    const { internalBinding, requireBuiltin } = closureOf(process.binding, ['internalBinding', 'requireBuiltin']);
    const { setTickCallback, tickInfo } = internalBinding('task_queue');
    // Without a tick, node's C++ runs microtasks by itself, past us.
    loop.alwaysTick = () => { tickInfo[0] = 1; };
    const drain = () => {
      drainMicrotasks();
      if (call !== null) loop.alwaysTick();
    };
    const { processImmediate, processTimers } = requireBuiltin('internal/timers').getTimerCallbacks(drain);
    internalBinding('timers').setupTimers(processImmediate, interruptible((now) => {
      const next = processTimers(now);
      drain();
      return next;
    }));
    setTickCallback(interruptible(drain));
  } catch { /* another node: see above */ }
}

function interruptible(body) {
  return (argument) => {
    const mine = call || NOBODY;
    if (mine.guarded) return body(argument);
    let result;
    let failure = null;
    const interrupted = guard(mine, () => {
      try { result = body(argument); } catch (error) { failure = { error }; }
    }, mine.interrupted ? briefly : breakOnSigint);
    if (interrupted && mine !== NOBODY) interrupt(mine);
    if (mine.over && !mine.sealed) later(() => seal(mine));
    if (interrupted) throw INTERRUPT; // node goes on with what is left
    if (failure !== null) throw failure.error;
    return result;
  };
}

// Variables of the scopes around a function.
function closureOf(inside, names) {
  const post = (method, parameters) => {
    let answer;
    session.post(method, parameters, (_, reply) => { answer = reply; });
    return answer;
  };
  const properties = (objectId) => post('Runtime.getProperties', { objectId, ownProperties: true });
  const found = {};
  const scopes = properties(remoteOf(inside)).internalProperties.find(({ name }) => name === '[[Scopes]]').value;
  for (const { value: scope } of properties(scopes.objectId).result) {
    if (!/^Closure/.test(scope.description)) continue;
    for (const { name, value } of properties(scope.objectId).result) {
      if (names.includes(name)) found[name] = valueOf(value);
    }
  }
  return found;
}

function exitCode(code) {
  const number = Number(code);
  return Number.isInteger(number) ? number & 255 : 0;
}

// Under the guard nothing catches it: the process interrupts itself, as `finally` must not run after exit.
process.exit = function exit(code) {
  const mine = call;
  if (mine !== null && !mine.over) {
    mine.exit = exitCode(code === undefined ? process.exitCode : code);
    if (mine.guarded) {
      apply(kill, process, [pid, 'SIGINT']);
      pause(HEARD_MS);
    }
    finish(mine, null, mine.exit);
  }
  throw EXIT;
};

// ---- what people read -----------------------------------------------------------------------------------

// As the REPL shows it, except that an object that throws when looked at is named instead.
function render(value) {
  try {
    return inspect(value, { colors: false, showProxy: true });
  } catch {
    return '[a value that cannot be inspected]';
  }
}

function clip(text) {
  if (text.length <= MAX_TEXT) return text;
  return `${text.slice(0, MAX_TEXT)}\n… ${text.length - MAX_TEXT} more characters left out`;
}

function describe(error) {
  const read = (name, otherwise) => {
    try {
      const value = error[name];
      return typeof value === 'string' ? value.slice(0, MAX_TEXT) : otherwise();
    } catch {
      return otherwise();
    }
  };
  if (!isErrorLike(error)) return { name: 'Uncaught', message: clip(render(error)) };
  return { name: read('name', () => 'Error'), message: read('message', () => '') };
}

function isErrorLike(value) {
  try {
    return isNativeError(value) || value instanceof Error;
  } catch {
    return false;
  }
}

// Node's form: place, source line, caret, then the error without the frames of this driver.
function traceback(mine, error, position) {
  const text = render(error);
  try {
    const body = isErrorLike(error) ? withoutDriver(text, position !== null) : `Uncaught ${text}`;
    return `${mine ? excerpt(mine, body, position) : ''}${body}\n`;
  } catch {
    return `${text}\n`; // user code replaced a method of String or Array
  }
}

function withoutDriver(text, all) {
  const ours = (line) => /^\s+at /.test(line) && (all || line.includes(__filename) || line.includes('(node:inspector:')
    || line.includes('(node:vm:') || line.includes('node:internal/process/task_queues:'));
  const lines = text.split('\n').filter((line) => !ours(line));
  return lines.join('\n').replace(/^\s+at .*\n?$/, '').replaceAll(IMPORT, 'import');
}

function excerpt(mine, body, position) {
  const name = `<call-${mine.id}>`;
  let [line, column] = position ? [position.lineNumber + 1, position.columnNumber + 1] : [0, 0];
  if (!position) {
    const at = body.indexOf(`${name}:`);
    const found = at < 0 ? null : /^:(\d+):(\d+)/.exec(body.slice(at + name.length, at + name.length + 24));
    if (found) [line, column] = [Number(found[1]), Number(found[2])];
  }
  const text = mine.code.split('\n')[line - 1];
  if (text === undefined || text.length > 500) return '';
  return `${name}:${line}\n${text}\n${text.slice(0, column - 1).replace(/[^\t]/g, ' ')}^\n\n`;
}

// Shows a value on the control pipe; Deno's convention lets an object choose its own mime bundle.
async function show(mine, kind, value, then) {
  let bundle = null;
  try {
    const own = value !== null && typeof value === 'object' && value[DISPLAY];
    if (typeof own === 'function') bundle = apply(own, value, []);
    if (bundle && typeof bundle.then === 'function') bundle = await bundle;
  } catch (error) {
    complain(traceback(mine, error, null));
    bundle = null;
  }
  if (!mine.sealed) send(displayLine(mine.id, kind, bundle) || plainLine(mine.id, kind, value));
  if (then) then();
}

function displayLine(id, kind, bundle) {
  if (bundle === null || typeof bundle !== 'object') return null;
  try {
    const line = `{"id":${id},"display":{"kind":"${kind}","mime":${stringify(bundle)}}}`;
    return line.length < MAX_REPLY && Buffer.byteLength(line) < MAX_REPLY ? line : null;
  } catch {
    return null;
  }
}

function plainLine(id, kind, value) {
  return `{"id":${id},"display":{"kind":"${kind}","mime":{"text/plain":${stringify(clip(render(value)))}}}}`;
}

// ---- source ---------------------------------------------------------------------------------------------

// `{a: 1}` alone is an object, as in the REPL, if it can be one.
function asExpression(code) {
  if (!/^\s*\{/.test(code) || /;\s*$/.test(code)) return code;
  try {
    new vm.Script(`async () => (${code}\n)`);
    return `(${code}\n)`;
  } catch {
    return code;
  }
}

// Tokens as far as needed to tell code from text: strings, comments, regular expressions and nesting.
const TOKEN = /(\s+|\/\/[^\n]*|\/\*[^]*?\*\/)|('(?:[^'\\\n]|\\[^])*'|"(?:[^"\\\n]|\\[^])*")|([\p{ID_Start}$_#][\p{ID_Continue}$\u200c\u200d]*)|(\d[\w.]*)|(\/(?:[^/\\\n[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/\w*)|([^])/uy;
const TEMPLATE = /(?:[^`\\$]|\\[^]|\$(?!\{))*(`|\$\{)/y;
const BEFORE_REGEXP = /^(?:|[({[,;:=!&|?+\-*%<>~^}]|return|typeof|case|in|of|do|else|void|delete|throw|new|await|yield)$/;

function* tokens(source) {
  const nesting = [];
  let before = '';
  for (let at = 0; at < source.length;) {
    TOKEN.lastIndex = at;
    let [text, space, , word, , regexp] = TOKEN.exec(source);
    if (regexp && !BEFORE_REGEXP.test(before)) text = '/';
    const closes = text === '`' || (text === '}' && nesting[nesting.length - 1] === '`');
    if (closes) {
      if (text === '}') nesting.pop();
      TEMPLATE.lastIndex = at + 1;
      const rest = TEMPLATE.exec(source);
      if (!rest) throw new SyntaxError('unterminated template');
      if (rest[1] === '${') nesting.push('`');
      text += rest[0];
    } else if (/^[({[]$/.test(text)) {
      nesting.push(text);
    } else if (/^[)}\]]$/.test(text)) {
      nesting.pop();
    }
    if (!space) {
      yield { text, word: word !== undefined, at, before, depth: nesting.length };
      before = closes ? 'x' : text;
    }
    at += text.length;
  }
}

// What V8's REPL mode lacks. `flips` are names whose declaration here takes the other kind, lexical or `var`.
function rewrite(source, flips) {
  if (flips.length === 0 && !/\b(?:import|const)\b/.test(source)) return source;
  const list = [...tokens(source)];
  const edits = [];
  list.forEach((token, index) => {
    if (!token.word || token.before === '.') return;
    const next = list[index + 1] || { text: '' };
    if (token.text === 'import' && next.text === '(') {
      if (!isMethod(list, index + 1)) edits.push([token.at, 6, IMPORT]);
    } else if (token.depth > 0) {
      return;
    } else if (token.text === 'import') {
      edits.push(importStatement(source, token.at));
    } else if (/^(?:const|let|var)$/.test(token.text)) {
      const flip = declares(list, index, flips);
      const lexical = (token.text === 'var') === flip;
      edits.push([token.at, token.text.length, (lexical ? 'let' : 'var').padEnd(token.text.length)]);
    } else if (/^(?:function|class)$/.test(token.text) && flips.length > 0) {
      edits.push(...namedExpression(list, index, flips));
    }
  });
  return edits.filter(Boolean).reverse().reduce(
    (text, [at, length, replacement]) => text.slice(0, at) + replacement + text.slice(at + length), source);
}

// `import(x) { … }` in a class or an object is somebody's method.
function isMethod(list, open) {
  const close = list.findIndex((token, index) => index > open && token.text === ')' && token.depth < list[open].depth);
  return close > 0 && list[close + 1] !== undefined && list[close + 1].text === '{';
}

function declares(list, index, names) {
  for (let i = index + 1; i < list.length && !(list[i].text === ';' && list[i].depth === 0); i++) {
    if (names.includes(list[i].text) && /^(?:const|let|var|,|\{|\[|:|\.)$/.test(list[i].before)) return true;
    if (list[i].depth === 0 && /^(?:const|let|var|function|class)$/.test(list[i].text)) return false;
  }
  return false;
}

// `function f() {}` over a `let f` becomes `let f=function f() {};`, a class over a `var` likewise.
function namedExpression(list, index, names) {
  const token = list[index];
  const name = list[index + 1].text === '*' ? list[index + 2] : list[index + 1];
  const first = token.before === 'async' ? list[index - 1] : token;
  if (!name || !names.includes(name.text) || /^[=,:?]$/.test(first.before)) return []; // an expression already
  const end = list.find((it, i) => i > index && it.text === '}' && it.depth === 0);
  const kind = token.text === 'class' ? 'var' : 'let';
  return end ? [[first.at, 0, `${kind} ${name.text}=`], [end.at + 1, 0, ';']] : [];
}

const STATEMENT = /import(?:\s*([\p{ID_Start}$_][\p{ID_Continue}$]*)?\s*,?\s*(?:\*\s*as\s+([\p{ID_Start}$_][\p{ID_Continue}$]*)|\{([^}]*)\})?\s*from)?\s*('[^'\n]*'|"[^"\n]*")(?:\s*with\s*(\{[^}]*\}))?/uy;
function importStatement(source, at) {
  STATEMENT.lastIndex = at;
  const match = STATEMENT.exec(source);
  if (!match) return null;
  const [text, fallback, namespace, named, specifier, attributes] = match;
  const names = [];
  if (fallback) names.push(`default: ${fallback}`);
  if (named) names.push(named.replace(/\s+as\s+/g, ': '));
  const loaded = `await ${IMPORT}(${specifier}${attributes ? `, {with: ${attributes}}` : ''})`;
  const pattern = `{${names.join(', ')}}`;
  const statement = namespace ? `let ${namespace} = ${loaded}${fallback ? `, ${pattern} = ${namespace}` : ''}`
    : names.length ? `let ${pattern} = ${loaded}` : loaded;
  const lost = text.split('\n').length - statement.split('\n').length; // later lines keep their numbers
  return [at, text.length, statement + '\n'.repeat(Math.max(0, lost))];
}

// The source for another attempt after V8 refused a name, or null if that was not the reason.
function flipped(code, details, flips) {
  const text = (details.exception && details.exception.description) || '';
  const name = /^SyntaxError: Identifier '(.+?)' has already been declared/.exec(text);
  if (!name || flips.includes(name[1])) return null;
  flips.push(name[1]);
  try {
    return rewrite(code, flips);
  } catch {
    return null;
  }
}

// ---- globals --------------------------------------------------------------------------------------------

function define(name, value) {
  Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
}

// `_` and `_error` follow the calls until the user takes the name for something else.
const underscore = { _: undefined, _error: undefined, set(name, value) { this[name] = value; } };
for (const name of ['_', '_error']) {
  Object.defineProperty(globalThis, name, {
    configurable: true, enumerable: false, get: () => underscore[name], set: (value) => define(name, value),
  });
}

// The session's module lives in the working directory, wherever that is now.
let here = null;
let resolver = null;
let importer = null;
const main = new Module('<carrel>');
function followWorkingDirectory() {
  let now;
  try { now = apply(cwd, process, []); } catch { return; } // the directory was removed
  if (now === here) return;
  here = now;
  main.filename = path.join(here, '<carrel>');
  main.paths = Module._nodeModulePaths(here);
  resolver = Module.createRequire(main.filename);
  importer = null;
}

function require_(id) { return resolver(id); }
Object.defineProperty(require_, 'name', { value: 'require' });
for (const key of ['resolve', 'cache', 'main', 'extensions']) {
  Object.defineProperty(require_, key, { get: () => resolver[key], enumerable: true, configurable: true });
}

// A CommonJS module compiled in the working directory is the one place where `import()` resolves from there
// in every version of node.
function importHere(specifier, options) {
  if (importer === null) {
    const module_ = new Module(main.filename);
    module_.paths = main.paths;
    module_._compile('module.exports = (it, options) => options === undefined ? import(it) : import(it, options)',
      path.join(here, '<carrel>.cjs'));
    importer = module_.exports;
  }
  return importer(specifier, options);
}

define('require', require_);
define('module', main);
define('exports', main.exports);
define('display', (value) => { if (call !== null) show(call, 'display', value, null); });
define(IMPORT, importHere);
for (const name of Module.builtinModules) {
  if (/^_|\//.test(name) || name in globalThis) continue;
  Object.defineProperty(globalThis, name, {
    configurable: true, enumerable: false, get: () => require(name), set: (value) => define(name, value),
  });
}

// Standard output and error as streams that write at once: node's own would make the pipe, which child
// processes share, non-blocking, and would still hold data when the call is over.
function standardStream(fd) {
  const { Writable } = require('stream');
  const stream = new Writable({ autoDestroy: false, emitClose: false });
  // In place of Writable's own: an interrupt in the middle of that would leave it waiting for its end for ever.
  stream.write = function write(chunk, encoding, done) {
    const callback = typeof encoding === 'function' ? encoding : done;
    let failure = null;
    try {
      writeFully(fd, asBytes(chunk, encoding));
    } catch (error) {
      if (error.code === 'ERR_INVALID_ARG_TYPE') throw error;
      if (error.code !== 'EPIPE') failure = error;
    }
    if (typeof callback === 'function') process.nextTick(callback, failure);
    else if (failure !== null) process.nextTick(() => this.emit('error', failure));
    return true;
  };
  // A pipeline that ends its output must not end everybody's.
  stream.end = function end(chunk, encoding, done) {
    const callback = [chunk, encoding, done].find((it) => typeof it === 'function');
    if (chunk !== undefined && chunk !== null && typeof chunk !== 'function') this.write(chunk, typeof encoding === 'string' ? encoding : undefined);
    process.nextTick(() => { this.emit('finish'); if (callback) callback(); });
    return this;
  };
  stream.destroy = function destroy() { return this; };
  stream.destroySoon = stream.destroy;
  return Object.assign(stream, { fd, _type: 'pipe', _isStdio: true });
}

function asBytes(chunk, encoding) {
  if (typeof chunk === 'string') return Buffer.from(chunk, typeof encoding === 'string' ? encoding : undefined);
  if (ArrayBuffer.isView(chunk)) return Buffer.from(chunk.buffer, chunk.byteOffset, chunk.byteLength);
  throw Object.assign(new TypeError('The "chunk" argument must be of type string or an instance of Buffer, TypedArray, or DataView'),
    { code: 'ERR_INVALID_ARG_TYPE' });
}

for (const [name, fd] of [['stdout', 1], ['stderr', 2]]) {
  let stream = null;
  Object.defineProperty(process, name, {
    configurable: true, enumerable: true, get: () => (stream = stream || standardStream(fd)), set: (it) => { stream = it; },
  });
}

// ---- the brief: what the session holds, seen without running any code of the user's ----------------------------------

const LOOKED_AT = 300; // the newest names
const TOLD = 40;
const CLIP = 60;
const startNames = new Set(ownKeys(globalThis)); // what is there before user code
const hasName = Set.prototype.has;
const environment = process.env;
const slice = String.prototype.slice;
const getter = (prototype, name) => getOwnPropertyDescriptor(prototype, name).get;
const sizeOfMap = getter(Map.prototype, 'size');
const sizeOfSet = getter(Set.prototype, 'size');
const typedArray = getPrototypeOf(Uint8Array.prototype);
const lengthOfTyped = getter(typedArray, 'length');
const bytesOfTyped = getter(typedArray, 'byteLength');
const bytesOfBuffer = getter(ArrayBuffer.prototype, 'byteLength');

function tellBrief(id, given) {
  let held = '{}';
  try { held = holdings(given); } catch { /* user code has replaced something we need */ }
  send(`{"id":${id},"brief":${held}}`);
}

// Values come through a function of ours: the inspector would draw a picture of each, and ask an error for its stack.
function holdings(given) {
  const ranked = ['', '', '']; // data, what is called, accessors
  const counts = [0, 0, 0];
  const note = (name, value, accessor) => {
    const rank = accessor ? 2 : typeof value === 'function' ? 1 : 0;
    if (counts[rank] === TOLD) return;
    counts[rank] += 1;
    ranked[rank] += `,{"name":${stringify(clipped(name))},${accessor ? '"type":"accessor"' : described(value)}}`;
  };
  const lexical = lexicalNames();
  let code = '';
  for (let at = lexical.length - 1; at >= 0 && lexical.length - at <= LOOKED_AT; at--) {
    // One whose declaration failed has no value.
    code += `try { this.take(${at}, ${lexical[at]}) } catch { this.take(${at}) }\n`;
  }
  if (code !== '') {
    receiver.take = (at, value) => note(lexical[at], value, false);
    session.post('Runtime.callFunctionOn', {
      __proto__: null, functionDeclaration: `function () { ${code} }`, objectId: receiverId, silent: true,
    });
    receiver.take = null;
  }
  const names = ownKeys(globalThis);
  let total = lexical.length;
  let looked = 0;
  for (let at = names.length - 1; at >= 0; at--) {
    const name = names[at];
    if (typeof name !== 'string' || apply(hasName, startNames, [name])) continue;
    total += 1;
    looked += 1;
    if (looked > LOOKED_AT) continue;
    const property = getOwnPropertyDescriptor(globalThis, name);
    if (property === undefined) continue;
    const data = getOwnPropertyDescriptor(property, 'value');
    note(name, data && data.value, data === undefined);
  }
  const shown = apply(slice, ranked[0] + ranked[1] + ranked[2], [1]);
  const lists = changes(given);
  return `{"variables":[${shown}],"total":${total},"set":[${lists[0]}],"unset":[${lists[1]}]}`;
}

function lexicalNames() {
  let names = [];
  session.post('Runtime.globalLexicalScopeNames', { __proto__: null }, (_, reply) => { if (reply) names = reply.names; });
  return names;
}

function clipped(text) {
  return text.length > CLIP ? apply(slice, text, [0, CLIP]) : text;
}

// Names of environment variables that are not as they were given. Their values may be secrets.
function changes(given) {
  const lists = ['', ''];
  const note = (which, name) => {
    if (lists[which].length < 4096) lists[which] += `${lists[which] === '' ? '' : ','}${stringify(clipped(name))}`;
  };
  const names = ownKeys(environment);
  for (let at = 0; at < names.length; at++) {
    const name = names[at];
    if (typeof name !== 'string') continue;
    const was = getOwnPropertyDescriptor(given, name);
    if (was === undefined || was.value !== environment[name]) note(0, name);
  }
  const before = ownKeys(given);
  for (let at = 0; at < before.length; at++) {
    if (environment[before[at]] === undefined) note(1, before[at]);
  }
  return lists;
}

// `"type":…` and what else can be known of a value. A proxy is asked nothing; of all others only what V8 itself keeps.
function described(value) {
  const type = typeof value;
  if (value === null) return '"type":"null"';
  if (type === 'number' || type === 'boolean' || type === 'bigint') {
    const text = type === 'bigint' && (value > 2n ** 64n || value < -(2n ** 64n)) ? '' : `${value}`;
    return `"type":"${type}"${text && `,"value":"${text}"`}`;
  }
  if (type === 'string') return `"type":"string","shape":"${value.length}"`;
  if (type !== 'object') return `"type":"${type}"`;
  if (isProxy(value)) return '"type":"Proxy"';
  const name = `"type":${stringify(clipped(className(value)))}`;
  if (isArray(value)) return `${name},"shape":"${value.length}"`;
  if (isMap(value)) return `${name},"shape":"${apply(sizeOfMap, value, [])}"`;
  if (isSet(value)) return `${name},"shape":"${apply(sizeOfSet, value, [])}"`;
  if (isTypedArray(value)) return `${name},"shape":"${apply(lengthOfTyped, value, [])}","size":${apply(bytesOfTyped, value, [])}`;
  if (isArrayBuffer(value)) return `${name},"size":${apply(bytesOfBuffer, value, [])}`;
  return name;
}

function className(value) {
  for (let at = getPrototypeOf(value), depth = 0; at !== null && depth < 100; at = getPrototypeOf(at), depth++) {
    if (isProxy(at)) break;
    const made = getOwnPropertyDescriptor(at, 'constructor');
    if (made === undefined) continue;
    const by = getOwnPropertyDescriptor(made, 'value');
    if (by === undefined || typeof by.value !== 'function' || isProxy(by.value)) break;
    const name = getOwnPropertyDescriptor(by.value, 'name');
    const text = name && getOwnPropertyDescriptor(name, 'value');
    return text && typeof text.value === 'string' && text.value !== '' ? text.value : 'Object';
  }
  return 'Object';
}

// ---- requests -------------------------------------------------------------------------------------------

followWorkingDirectory();
let partial = [];
const { concat } = Buffer;
function enqueue(request) {
  const entry = { request, next: null };
  if (queue.first === null) queue.first = entry;
  else queue.last.next = entry;
  queue.last = entry;
}

function receiveBytes(count, buffer) {
  let from = 0;
  for (let at; (at = buffer.indexOf(10, from)) >= 0 && at < count; from = at + 1) {
    partial[partial.length] = Buffer.from(buffer.subarray(from, at));
    enqueue(parse(concat(partial).toString('utf8')));
    partial = [];
  }
  if (from < count) partial[partial.length] = Buffer.from(buffer.subarray(from, count));
  runNext(true);
  return true;
}
const inbox = Buffer.allocUnsafeSlow(1 << 16);
const listening = listen(); // held, so that it is not collected

// The pipe's own handle: to load node's `net` module takes as long as a tenth of node's whole start.
function listen() {
  let Pipe, constants, streamBaseState, kReadBytesOrError;
  try {
    ({ Pipe, constants } = process.binding('pipe_wrap'));
    ({ streamBaseState, kReadBytesOrError } = process.binding('stream_wrap'));
  } catch { /* not in this node */ }
  if (typeof Pipe !== 'function' || !streamBaseState || typeof Pipe.prototype.useUserBuffer !== 'function') return listenByModule();
  const handle = new Pipe(constants.SOCKET);
  if (handle.open(control.input)) return listenByModule();
  handle.useUserBuffer(inbox);
  handle.onread = () => {
    const count = streamBaseState[kReadBytesOrError];
    if (count > 0) receiveBytes(count, inbox);
    else if (count < 0) apply(reallyExit, process, [count === END_OF_FILE ? 0 : EXIT_CONTROL_LOST]);
  };
  handle.readStart();
  return handle;
}

function listenByModule() {
  const requests = new (require('net').Socket)({
    fd: control.input, readable: true, writable: false, onread: { buffer: inbox, callback: receiveBytes },
  });
  requests.on('end', () => apply(reallyExit, process, [0]));
  requests.on('error', () => apply(reallyExit, process, [EXIT_CONTROL_LOST]));
  requests.resume();
  return requests;
}
