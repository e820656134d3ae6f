//! Examples at the end of each `--help`.

pub(super) const ALL: &str = "\
Examples:
  carrel run 'print(6*7)'                      python in a fresh sandbox, gone afterwards
  carrel run -s work 'x = [1, 2, 3]'           a session: x is there at the next call
  carrel run -s work -e bash 'cd /tmp; ls'     bash in the same sandbox
  carrel exec work -- pytest -q                a command in it
  carrel ls                                    what there is
  carrel close work                            the end of it

Exit codes: of the code that ran; 124 timeout, 125 carrel's own failure, 127 no such command, 130 interrupted.
Colours follow the terminal and NO_COLOR.";

pub(super) const RUN: &str = "\
Examples:
  carrel run 'print(6*7)'
  carrel run -e node '[1, 2, 3].map(x => x * 2)'
  carrel run -s work - < script.py
  carrel run -s work --file train.py --timeout 5m
  carrel run -s work/tests -e bash 'make test'      another session of the sandbox `work`
  carrel run --project . 'open(\"/project/README.md\").read()[:80]'
  carrel run --json 'undefined_name'";

pub(super) const EXEC: &str = "\
Examples:
  carrel exec work -- pytest -q
  carrel exec -d work -- python3 -m http.server 8000
  carrel exec -i work -- tar xz < source.tar.gz
  carrel exec -it work -- top
  carrel exec -e DEBUG=1 -C /workspace/app work -- make";

pub(super) const LOGS: &str = "\
Examples:
  carrel logs work ex_3
  carrel logs work ex_3 --follow
  carrel logs work ex_3 --since 12 --json";

pub(super) const WAIT: &str = "\
Examples:
  carrel wait work ex_3
  carrel wait work ex_3 --timeout 10m || echo failed";

pub(super) const KILL: &str = "\
Examples:
  carrel kill work ex_3
  carrel kill work ex_3 --signal KILL";

pub(super) const UNDO: &str = "\
Examples:
  carrel undo work
  carrel undo work -k 2 --json
  carrel undo work/tests";

pub(super) const LS: &str = "\
Examples:
  carrel ls
  carrel ls --json | jq -r '.sandboxes[].id'";

pub(super) const BRIEF: &str = "\
Examples:
  carrel brief work
  carrel brief work/second --json";

pub(super) const INSPECT: &str = "\
Examples:
  carrel inspect work
  carrel inspect sbx_abcdefghijkmnpqr --json";

pub(super) const SNAPSHOT: &str = "\
Examples:
  carrel snapshot work
  carrel snapshot work --tag before-upgrade
  carrel snapshot work --files-only --json";

pub(super) const RESTORE: &str = "\
Examples:
  carrel restore snp_abcdefghijkmnpqr            the sandbox becomes what it was
  carrel restore before-upgrade --as second      a new sandbox beside it";

pub(super) const FORK: &str = "\
Examples:
  carrel fork work -n 3
  for name in $(carrel fork work -n 3); do carrel run -s $name 'attempt()'; done";

pub(super) const ADOPT: &str = "\
Examples:
  carrel adopt work-2                            work-2 is `work` now, and what was `work` is `work-2`";

pub(super) const DIFF: &str = "\
Examples:
  carrel diff before-upgrade                     since then, in its own sandbox
  carrel diff before-upgrade work
  carrel diff snp_abcdefghijkmnpqr snp_stuvwxyz23456789 --json";

pub(super) const SNAPSHOTS: &str = "\
Examples:
  carrel snapshots
  carrel snapshots --tree
  carrel snapshots rm before-upgrade
  carrel snapshots export good work.carrel
  carrel snapshots import work.carrel && carrel restore good --as work2";

pub(super) const OPEN: &str = "\
Examples:
  carrel open work
  carrel open work -e node --memory 2GB --cpus 4 --idle-timeout 1h
  carrel open work --project . --project-writable";

pub(super) const CLOSE: &str = "\
Examples:
  carrel close work
  carrel close work --keep-workspace ./result
  carrel close --all";

pub(super) const STANDBY: &str = "\
Examples:
  carrel standby work
  carrel standby work --json

A call that is under way stands still too, while its time passes. Where `carrel serve` runs, idle sandboxes are put into
standby by themselves.";

pub(super) const HIBERNATE: &str = "\
Examples:
  carrel hibernate work
  carrel hibernate work --json

Needs CRIU on the host; `carrel doctor` says whether it can be used. Refused while a call is under way.";

pub(super) const WAKE: &str = "\
Examples:
  carrel wake work
  carrel wake work --json";

pub(super) const SHELL: &str = "\
Examples:
  carrel shell work
  carrel shell work -e python";

pub(super) const CP: &str = "\
Examples:
  carrel cp data.csv work:data.csv
  carrel cp work:out/plot.png .
  carrel cp -r src work:src
  carrel cp -r work:/workspace ./result
  curl -s https://example.org | carrel cp - work:page.html
  carrel cp -r work:src - | tar t";

pub(super) const FILES: &str = "\
Examples:
  carrel files ls work --long
  carrel files cat work notes.md
  carrel files rm -r work build
  carrel files search work TODO --glob '*.py'";

pub(super) const DOCTOR: &str = "\
Examples:
  carrel doctor
  carrel doctor --prove";

pub(super) const CONFIG: &str = "\
Examples:
  carrel config show
  carrel --config other.toml config show --json";

pub(super) const COMPLETIONS: &str = "\
Examples:
  carrel completions bash > ~/.local/share/bash-completion/completions/carrel
  carrel completions fish > ~/.config/fish/completions/carrel.fish";

pub(super) const MCP: &str = "\
Examples:
  carrel mcp                                     for a client that starts it
  carrel mcp --http 127.0.0.1:8765               for clients that connect
  carrel mcp --tools code --scope run_42         several agents of one workflow
  carrel mcp install claude-code                 write it into a client's configuration";

pub(super) const INSTALL: &str = "\
Examples:
  carrel mcp install                             which clients are known and found here
  carrel mcp install claude-code
  carrel mcp install cursor --project -- --memory 2GB --tools all
  carrel mcp install codex --http https://sandbox.example.com/mcp
  carrel mcp install vscode --print
  carrel mcp install zed --uninstall";

pub(super) const SERVE: &str = "\
Examples:
  carrel serve                                 on the unix socket alone
  carrel serve --listen 127.0.0.1:8700         and on TCP, for who has a token
  carrel serve --listen 0.0.0.0:8700 --tls-cert cert.pem --tls-key key.pem --allow-host box.example.com

While it runs, the other commands and `carrel mcp` go through it. SIGHUP reads the configuration again; SIGTERM ends
the daemon, and sandboxes stay alive.";

pub(super) const TOKEN: &str = "\
Examples:
  export CARREL_TOKEN=$(carrel token create --name ci)
  carrel token create --name team-a --scope run --quota sandboxes=20,cpu=8,memory=16GB,disk=50GB,rate=50 --expires 30d
  carrel token list
  carrel token revoke tok_abcdefghijkmnpqr";
