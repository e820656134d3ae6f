//! What flows between processes and callers: output to its exec and its followers, input to its process, and who has
//! to wait for whom.

use carrel_proto::{frame::Stream, id::ExecId};

use crate::{
    poll::Token,
    process::{self, Piece, Role},
    serve::Agent,
};
/// A caller this far behind slows the code down, as a full pipe would.
const PAUSE: usize = 2 << 20;

impl Agent {
    /// The run or exec that a process's output belongs to now.
    pub(crate) fn target(&self, id: u32) -> Option<u64> {
        match self.processes.get(&id)?.role {
            Role::Exec(number) => Some(number),
            Role::Interpreter => self.interpreters.get(&id)?.current,
        }
    }

    pub(crate) fn hear_stream(&mut self, id: u32, stream: Stream) {
        self.take_piece(id, stream, usize::MAX);
        if let Some(exec) = self.target(id) {
            self.pump_followers(exec);
            self.settle(exec, id);
        }
    }

    /// Moves one piece of a stream to its exec. `false`: nothing there.
    pub(crate) fn take_piece(&mut self, id: u32, stream: Stream, most: usize) -> bool {
        let Some(process) = self.processes.get_mut(&id) else { return false };
        let fd = match stream {
            Stream::Stderr => &mut process.stderr,
            _ => &mut process.stdout,
        };
        let Some(open) = fd else { return false };
        match process::take(open, &mut self.scratch, most) {
            Piece::Nothing => false,
            Piece::End => {
                self.poller.forget(&*open);
                *fd = None;
                false
            }
            Piece::Bytes(bytes) => {
                let stream = if process.terminal { Stream::Pty } else { stream };
                match self.target(id) {
                    Some(exec) => {
                        if let Some(exec) = self.execs.get_mut(&exec) {
                            exec.output.push(stream, bytes);
                        }
                    }
                    None => {
                        if let Some(interpreter) = self.interpreters.get_mut(&id) {
                            interpreter.background[usize::from(stream == Stream::Stderr)].add(&bytes);
                        }
                    }
                }
                true
            }
        }
    }

    /// Takes what a process has written up to now, and no more: something in the background may write for ever.
    pub(crate) fn drain(&mut self, id: u32) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let Some(process) = self.processes.get(&id) else { return };
            let fd = if stream == Stream::Stdout { &process.stdout } else { &process.stderr };
            let mut left = fd.as_ref().map_or(0, process::available);
            while left > 0 {
                let before = left;
                left = left.saturating_sub(carrel_proto::frame::MAX_DATA);
                if !self.take_piece(id, stream, before) {
                    break;
                }
            }
        }
    }

    /// How far the caller that started an exec has got, while it is there.
    pub(crate) fn primary(&self, number: u64) -> Option<u64> {
        let name = ExecId::numbered(number);
        let followers = self.connections.values().flat_map(|caller| &caller.followers);
        followers
            .filter(|follower| follower.primary && follower.exec == name)
            .map(|follower| follower.next)
            .min()
    }

    /// Output goes to the spool; a caller far behind makes the code wait.
    pub(crate) fn settle(&mut self, number: u64, id: u32) {
        let primary = self.primary(number);
        let Some(exec) = self.execs.get_mut(&number) else { return };
        if let Err(error) = exec.output.settle(primary) {
            crate::say(&format!("keeping output: {error}"));
        }
        let behind = primary.map_or(0, |next| exec.output.behind(next));
        if behind > PAUSE
            && let Some(process) = self.processes.get_mut(&id)
            && !process.paused
        {
            process.paused = true;
            // Taken out altogether: a stream whose writers are gone would report that for ever.
            for fd in [&process.stdout, &process.stderr].into_iter().flatten() {
                self.poller.forget(fd);
            }
        }
    }

    /// Reads on from a process that was made to wait, once its caller has caught up or gone.
    pub(crate) fn resume(&mut self, number: u64) {
        let Some(id) = self.execs.get(&number).and_then(|exec| exec.process) else { return };
        if !self.processes.get(&id).is_some_and(|process| process.paused) {
            return;
        }
        let primary = self.primary(number);
        let Some(exec) = self.execs.get_mut(&number) else { return };
        if primary.is_some_and(|next| exec.output.behind(next) > PAUSE / 2) {
            return;
        }
        let _ = exec.output.settle(primary);
        self.unpause(id);
    }

    /// Reads on from a process, however far its caller is behind: that call is over, and the next one has its own.
    pub(crate) fn unpause(&mut self, id: u32) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        if !std::mem::take(&mut process.paused) {
            return;
        }
        if let Some(fd) = &process.stdout {
            let _ = self.poller.readable(fd, Token::Stdout(id));
        }
        if let Some(fd) = &process.stderr {
            let _ = self.poller.readable(fd, Token::Stderr(id));
        }
    }

    /// Feeds a process what its caller has sent.
    pub(crate) fn feed(&mut self, id: u32) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        let Some(input) = &mut process.stdin else { return self.unstall(id) };
        match input.flush() {
            Ok(false) => {
                // Registered once; being registered already is as good.
                let _ = self.poller.writable(&input.fd, Token::Stdin(id));
            }
            Ok(true) => {
                self.poller.forget(&input.fd);
                if input.closing {
                    process.stdin = None;
                }
            }
            Err(_) => {
                self.poller.forget(&input.fd);
                process.stdin = None;
            }
        }
        if !self
            .processes
            .get(&id)
            .and_then(|process| process.stdin.as_ref())
            .is_some_and(process::Input::is_full)
        {
            self.unstall(id);
        }
    }

    /// Hears callers again that had to wait for this process to take its input.
    pub(crate) fn unstall(&mut self, id: u32) {
        let stalled: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, caller)| caller.stalled == Some(id))
            .map(|(number, _)| *number)
            .collect();
        for number in stalled {
            let Some(caller) = self.connections.get_mut(&number) else { continue };
            caller.stalled = None;
            let _ = self.poller.change(&caller.socket, Token::Connection(number), true, caller.waiting);
            self.hear_frames(number);
        }
        self.take_writes(id);
    }
}
