// The official client, 1.x and 2.x, behind the few words that the tasks need.

import { readFileSync } from 'node:fs';

const NEW = process.env.MCP_CLIENT !== '1';
const name = NEW ? '@modelcontextprotocol/client' : '@modelcontextprotocol/sdk';
const manifest = new URL(`../node_modules/${name}/package.json`, import.meta.url);
export const VERSION = JSON.parse(readFileSync(manifest)).version;
export { NEW };

const load = async () => {
  if (NEW) {
    const { Client, StreamableHTTPClientTransport } = await import('@modelcontextprotocol/client');
    const { StdioClientTransport } = await import('@modelcontextprotocol/client/stdio');
    return { Client, StdioClientTransport, StreamableHTTPClientTransport, updated: 'notifications/resources/updated' };
  }
  const sdk = '@modelcontextprotocol/sdk';
  const { Client } = await import(`${sdk}/client/index.js`);
  const { StdioClientTransport } = await import(`${sdk}/client/stdio.js`);
  const { StreamableHTTPClientTransport } = await import(`${sdk}/client/streamableHttp.js`);
  const { ResourceUpdatedNotificationSchema } = await import(`${sdk}/types.js`);
  return { Client, StdioClientTransport, StreamableHTTPClientTransport, updated: ResourceUpdatedNotificationSchema };
};
const library = await load();

/** A tool's result, as it came over the wire. */
class Outcome {
  constructor(result) {
    const of = (type) => result.content.filter((block) => block.type === type);
    this.failed = result.isError ?? false;
    this.text = of('text').map((block) => block.text).join('\n');
    this.images = of('image').map((block) => ({ mime: block.mimeType, data: Buffer.from(block.data, 'base64') }));
    this.links = Object.fromEntries(of('resource_link').map((block) => [block.name, block.uri]));
    this.structured = result.structuredContent;
  }
}

/** One client, connected. */
class Connection {
  constructor(client, transport) {
    this.client = client;
    this.transport = transport;
    this.heard = [];
    this.waiting = [];
    client.setNotificationHandler(library.updated, (note) => {
      const waiter = this.waiting.shift();
      if (waiter) waiter(note);
      else this.heard.push(note);
    });
  }

  /** A call under way, which `cancel` can end. */
  start(tool, words, progress) {
    const stop = new AbortController();
    const options = { signal: stop.signal, timeout: 90_000, resetTimeoutOnProgress: true };
    if (progress) options.onprogress = progress;
    const params = { name: tool, arguments: words };
    const answer = NEW ? this.client.callTool(params, options) : this.client.callTool(params, undefined, options);
    const call = { ended: false, stop };
    call.outcome = answer.then((result) => new Outcome(result)).finally(() => (call.ended = true));
    // Whoever awaits it sees the failure; a call that nobody awaits may fail.
    call.outcome.catch(() => {});
    return call;
  }

  call(tool, words, progress) {
    return this.start(tool, words, progress).outcome;
  }

  run(code, env = 'python', { progress, ...rest } = {}) {
    return this.call('run', { code, env, ...rest }, progress);
  }

  async cancel(call) {
    call.stop.abort('enough');
    await call.outcome.catch(() => {});
  }

  async tools() {
    return (await this.client.listTools()).tools;
  }

  async resources() {
    const { resources } = await this.client.listResources();
    return Object.fromEntries(resources.map(({ uri, name }) => [uri, name]));
  }

  async templates() {
    return (await this.client.listResourceTemplates()).resourceTemplates.map((template) => template.uriTemplate);
  }

  /** Text as text, everything else as bytes. */
  async read(uri) {
    const { contents } = await this.client.readResource({ uri });
    const parts = contents.map((part) => part.text ?? Buffer.from(part.blob, 'base64'));
    return parts.length === 1 ? parts[0] : parts;
  }

  async complete(template, argument, value, context) {
    const params = { ref: { type: 'ref/resource', uri: template }, argument: { name: argument, value } };
    if (context) params.context = { arguments: context };
    return (await this.client.complete(params)).completion.values;
  }

  /** Calls `work` with a function that returns when the resource has changed. */
  async watching(uri, work) {
    const changed = () =>
      this.heard.length ? Promise.resolve(this.heard.shift()) : new Promise((heard) => this.waiting.push(heard));
    const modern = NEW && this.client.getProtocolEra() === 'modern';
    const subscription = modern ? await this.client.listen({ resourceSubscriptions: [uri] }) : undefined;
    if (!modern) await this.client.subscribeResource({ uri });
    await work(changed);
    if (modern) await subscription.close();
    else await this.client.unsubscribeResource({ uri });
  }

  /** As most programs do it: without a word, unless it is to be said. */
  async leave(farewell = false) {
    if (farewell && this.transport.sessionId) await this.transport.terminateSession();
    await this.client.close();
  }
}

export async function connect(place, words = [], { as = 'tasks' } = {}) {
  const options = NEW ? { versionNegotiation: { mode: 'auto' } } : {};
  const client = new library.Client({ name: as, version: '1' }, options);
  let transport;
  if (place.transport === 'stdio') {
    const [command, ...args] = place.command(...words);
    transport = new library.StdioClientTransport({ command, args, env: place.environment });
  } else {
    const headers = { Authorization: `Bearer ${place.token}` };
    const url = new URL(await place.address(...words));
    transport = new library.StreamableHTTPClientTransport(url, { requestInit: { headers } });
  }
  const connection = new Connection(client, transport);
  await client.connect(transport);
  return connection;
}

/** A connection for as long as `work` takes. */
export async function connected(place, words, options, work) {
  const connection = await connect(place, words, options);
  try {
    return await work(connection);
  } finally {
    await connection.leave(options.farewell);
  }
}
