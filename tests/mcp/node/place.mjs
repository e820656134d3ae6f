// Servers under test: `carrel mcp` on HTTP, and the command line of one on stdio.

import { spawn, spawnSync } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';

const CARREL = process.env.CARREL_BIN ?? 'target/debug/carrel';

/** One state directory and the servers that work in it; all of it is gone afterwards. */
export class Place {
  constructor(transport) {
    this.transport = transport;
    this.state = mkdtempSync(join(tmpdir(), 'carrel-mcp-'));
    this.token = randomBytes(16).toString('hex');
    this.environment = { ...process.env, CARREL_TOKEN: this.token };
    this.servers = new Map();
  }

  command(...words) {
    return [CARREL, '--state', this.state, 'mcp', ...words];
  }

  /** Of an HTTP server with these arguments, started when first asked for. */
  async address(...words) {
    const key = words.join(' ');
    if (!this.servers.has(key)) {
      const [program, ...rest] = this.command('--http', '127.0.0.1:0', ...words);
      const child = spawn(program, rest, { env: this.environment, stdio: ['ignore', 'inherit', 'pipe'] });
      const lines = createInterface({ input: child.stderr });
      const url = await new Promise((found, failed) => {
        // It goes on reading: a full pipe would stop the server.
        lines.on('line', (line) => line.includes('serving MCP at ') && found(line.split(' ').pop()));
        child.once('exit', (code) => failed(new Error(`the server did not start: ${code}`)));
      });
      this.servers.set(key, { child, url });
    }
    return this.servers.get(key).url;
  }

  async leave() {
    for (const { child } of this.servers.values()) {
      const ended = once(child, 'exit');
      child.kill('SIGTERM');
      const [code] = await ended;
      if (code !== 0) throw new Error(`the server ended with ${code}`);
    }
    spawnSync(CARREL, ['--state', this.state, 'close', '--all'], { stdio: 'ignore' });
    rmSync(this.state, { recursive: true, force: true });
  }
}
