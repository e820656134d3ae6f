//! What systemd is told of the daemon's life. Without systemd nobody is told, which is no failure.

use sd_notify::NotifyState;

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("telling systemd: {error}");
    }
}

pub(super) fn ready() {
    tell(&[NotifyState::Ready]);
}

pub(super) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// Has to carry the time, so that systemd can tell the end of this reload from one before.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("telling systemd: {error}"),
    }
}
