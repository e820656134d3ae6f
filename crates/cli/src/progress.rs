//! One line on stderr about what takes longer than a second, gone when it is done. Only on a terminal.
//!
//! A thread, because what it reports on may block the one that does the work.

use std::{
    io::Write,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::output::Output;

const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Progress {
    running: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    pub(crate) fn start(output: &Output, what: &'static str) -> Self {
        if !output.lively || output.json {
            return Self { running: None };
        }
        let (stop, stopped) = channel::<()>();
        let show = move || {
            let begun = Instant::now();
            let mut shown = false;
            while stopped.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                shown = true;
                let _ = write!(std::io::stderr(), "\r\x1b[K{what}… {} s", begun.elapsed().as_secs());
            }
            if shown {
                let _ = write!(std::io::stderr(), "\r\x1b[K");
            }
        };
        // Without a thread there is no line, and nothing is lost.
        let running = std::thread::Builder::new().name("progress".into()).spawn(show).ok();
        Self { running: running.map(|thread| (stop, thread)) }
    }

    /// No line at all.
    pub(crate) fn none() -> Self {
        Self { running: None }
    }

    /// Takes the line away. Returns when nothing more will be written.
    pub(crate) fn stop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop();
    }
}
