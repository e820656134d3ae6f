//! A call under way: its output collected, its client kept informed, its end awaited or not.
//!
//! A client that cancels interrupts the code. A client that only goes away does not: the call goes on in the sandbox, and
//! its output can be read there later. While a call runs, progress with the newest lines goes out every second, so that a
//! client whose patience starts anew with progress keeps waiting.

use std::time::{Duration, Instant};

use carrel_engine::{
    Engine, Record,
    call::{Call, Output},
};
use carrel_proto::{
    frame::Stream,
    id::{ExecId, SessionName},
    message::{Display, ExecInfo, What},
    outcome::Outcome,
    problem::{Code, Problem},
};
use rmcp::{
    RoleServer,
    model::{ProgressNotificationParam, ProgressToken},
    service::{Peer, RequestContext},
};
use tokio::time::{MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

use super::text::{Section, clean, fit};
use crate::kept::Kept;

/// Between two words of progress.
const BEAT: Duration = Duration::from_secs(1);
/// Of the newest output that a word of progress carries.
const NEWEST: usize = 240;
/// Most values and pictures of one call that are looked at.
const MOST_DISPLAYS: usize = 64;

/// What a call printed and showed.
#[derive(Debug)]
pub(super) struct Transcript {
    pub(super) stdout: Kept,
    pub(super) stderr: Kept,
    pub(super) displays: Vec<Display>,
    /// The last bytes, for words of progress.
    newest: Vec<u8>,
}

impl Transcript {
    /// Keeps enough of each stream for a text of this many characters.
    pub(super) fn new(chars: usize) -> Self {
        let most = 4 * chars as u64;
        Self { stdout: Kept::new(most), stderr: Kept::new(most), displays: Vec::new(), newest: Vec::new() }
    }

    pub(super) fn add(&mut self, output: Output<'_>) -> Option<Outcome> {
        match output {
            Output::Bytes { stream, offset, bytes, .. } => {
                let kept = if stream == Stream::Stderr { &mut self.stderr } else { &mut self.stdout };
                kept.add(offset, bytes);
                let from = bytes.len().saturating_sub(NEWEST);
                self.newest.extend_from_slice(&bytes[from..]);
                let surplus = self.newest.len().saturating_sub(NEWEST);
                self.newest.drain(..surplus);
            }
            Output::Display { display, .. } if self.displays.len() < MOST_DISPLAYS => {
                self.displays.push(display)
            }
            Output::Finished(outcome) => return Some(outcome),
            Output::Started(_) | Output::Paused { .. } | Output::Display { .. } => {}
        }
        None
    }

    /// Both streams as text within one budget, and whether something of them is missing.
    pub(super) fn streams(&self, chars: usize) -> (String, String, bool) {
        let (stdout, stderr) = (Section::new(&self.stdout), Section::new(&self.stderr));
        let mut fitted = fit(&[&stdout, &stderr], chars).into_iter();
        let (stdout, stdout_cut) = fitted.next().unwrap_or_default();
        let (stderr, stderr_cut) = fitted.next().unwrap_or_default();
        (stdout, stderr, stdout_cut || stderr_cut)
    }

    /// The newest line or two.
    fn newest(&self) -> Option<String> {
        let text = clean(&String::from_utf8_lossy(&self.newest));
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines[lines.len().saturating_sub(2)..].join("\n");
        (!last.is_empty()).then_some(last)
    }
}

/// Whom a call is followed for.
#[derive(Debug)]
pub(super) struct Client {
    cancelled: CancellationToken,
    /// The SDK cancels whatever runs when a client goes away; that is no wish of the client's.
    gone: CancellationToken,
    progress: Option<(Peer<RoleServer>, ProgressToken)>,
    /// The client can ask for the result later, so after this long it is told to.
    task_after: Option<Duration>,
}

impl Client {
    pub(super) fn new(
        context: &RequestContext<RoleServer>,
        gone: &CancellationToken,
        task_after: Option<Duration>,
    ) -> Self {
        let token = context.meta.get_progress_token();
        let progress = token.map(|token| (context.peer.clone(), token));
        Self { cancelled: context.ct.clone(), gone: gone.clone(), progress, task_after }
    }

    async fn tell(&self, elapsed: Duration, message: String) {
        let Some((peer, token)) = &self.progress else { return };
        let word = ProgressNotificationParam::new(token.clone(), elapsed.as_secs_f64()).with_message(message);
        // A client that does not listen any more is noticed elsewhere.
        let _ = peer.notify_progress(word).await;
    }
}

#[derive(Debug)]
pub(super) enum End {
    Finished(Box<Outcome>),
    /// It goes on; the client is to ask later.
    Later(ExecId),
}

/// A call that may have to wait for others before it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queue<'a> {
    pub(super) engine: &'a Engine,
    pub(super) record: &'a Record,
    pub(super) session: &'a SessionName,
    /// How long it may wait.
    pub(super) patience: Duration,
}

/// Reads a call to its end.
pub(super) async fn follow(
    call: &mut Call,
    transcript: &mut Transcript,
    client: &Client,
    queue: Queue<'_>,
) -> Result<End, Problem> {
    let begun = Instant::now();
    let mut beat = interval_at(tokio::time::Instant::now() + BEAT, BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut exec, mut cancel, mut sent, mut waiting) = (None, false, false, true);
    loop {
        if cancel && !sent && call.control.has_begun() {
            call.control.cancel().await?;
            sent = true;
        }
        tokio::select! {
            biased;
            output = call.next() => {
                let output = output?;
                if let Output::Started(id) = &output {
                    exec = Some(id.clone());
                } else {
                    waiting = false;
                }
                if let Some(outcome) = transcript.add(output) {
                    return Ok(End::Finished(Box::new(outcome)));
                }
            }
            () = client.cancelled.cancelled(), if !cancel => {
                if client.gone.is_cancelled() {
                    return Err(Problem::new(Code::Cancelled, "the client has gone; the call goes on"));
                }
                cancel = true;
            }
            _ = beat.tick() => {
                let Some(exec) = &exec else { continue };
                let elapsed = begun.elapsed();
                let before = if waiting { queue.before(exec).await } else { None };
                waiting = before.is_some();
                match before {
                    Some(before) if elapsed > queue.patience => {
                        call.control.cancel().await?;
                        return Err(busy(&before));
                    }
                    Some(before) => client.tell(elapsed, format!("waiting for {}", busy_with(&before))).await,
                    None => {
                        if client.task_after.is_some_and(|after| elapsed > after) && !cancel {
                            return Ok(End::Later(exec.clone()));
                        }
                        let seconds = elapsed.as_secs();
                        let word = transcript.newest().unwrap_or_else(|| format!("running for {seconds} s"));
                        client.tell(elapsed, word).await;
                    }
                }
            }
        }
    }
}

impl Queue<'_> {
    /// The run that ours waits for.
    async fn before(&self, own: &ExecId) -> Option<ExecInfo> {
        let all = self.engine.execs(self.record).await.ok()?;
        let same = |info: &ExecInfo| info.session == *self.session && info.running;
        let mine = all.iter().find(|info| info.exec == *own)?.clone();
        all.into_iter()
            .take_while(|info| info.exec != *own)
            .find(|info| same(info) && matches!((&info.what, &mine.what), (What::Run { language: a }, What::Run { language: b }) if a == b))
    }
}

/// What an interpreter is busy with.
pub(super) fn busy_with(info: &ExecInfo) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_millis(info.started_unix_ms)).as_secs();
    let what = match &info.what {
        What::Run { language } => language.as_str().to_owned(),
        What::Exec { argv } => argv.join(" ").chars().take(60).collect(),
    };
    format!("{} ({what}, running for {age} s)", info.exec)
}

fn busy(before: &ExecInfo) -> Problem {
    Problem::new(Code::Busy, format!("the session is busy with {}", busy_with(before)))
        .hint("wait and call again, use another session, or pass a larger timeout")
        .state(carrel_proto::outcome::SessionState::Preserved)
}
