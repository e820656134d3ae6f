//! The user's own terminal: raw while a sandbox's terminal is shown on it, and as it was afterwards.

use std::io::IsTerminal;

use carrel_proto::{message::PtySize, problem::Problem};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// What a terminal without a known size gets.
const USUAL: PtySize = PtySize { rows: 24, cols: 80 };

/// Keys go through unread while this lives. Dropping it, also in a panic, restores the terminal; signals that would
/// end the process are taken as events by [`crate::signals::Interrupts`] and come here too.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// `None`: stdin is not a terminal.
    pub(crate) fn enter() -> Result<Option<Self>, Problem> {
        if !std::io::stdin().is_terminal() {
            return Ok(None);
        }
        let failed = |error| Problem::internal(format!("the terminal: {error}"));
        let before = tcgetattr(rustix::stdio::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(rustix::stdio::stdin(), OptionalActions::Flush, &raw).map_err(failed)?;
        Ok(Some(Self { before }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.before);
    }
}

pub(crate) fn size() -> PtySize {
    let sizes = [tcgetwinsize(rustix::stdio::stdout()), tcgetwinsize(rustix::stdio::stdin())];
    let known = sizes.into_iter().flatten().find(|size| size.ws_row > 0 && size.ws_col > 0);
    known.map_or(USUAL, |size| PtySize { rows: size.ws_row, cols: size.ws_col })
}
