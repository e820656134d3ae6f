//! What happened, for the operator's log and for clients that asked for it.

#![expect(deprecated, reason = "the newest protocol drops logging, every older client has it")]

use std::sync::atomic::{AtomicU8, Ordering};

use rmcp::{
    RoleServer,
    model::{LoggingLevel, LoggingMessageNotificationParam},
    service::RequestContext,
};

/// Nothing is sent to a client that never asked.
const SILENT: u8 = u8::MAX;

/// How much a connection wants to hear.
#[derive(Debug)]
pub(super) struct Log {
    least: AtomicU8,
}

impl Default for Log {
    fn default() -> Self {
        Self { least: AtomicU8::new(SILENT) }
    }
}

fn rank(level: LoggingLevel) -> u8 {
    match level {
        LoggingLevel::Debug => 0,
        LoggingLevel::Info => 1,
        LoggingLevel::Notice => 2,
        LoggingLevel::Warning => 3,
        LoggingLevel::Error => 4,
        LoggingLevel::Critical => 5,
        LoggingLevel::Alert => 6,
        LoggingLevel::Emergency => 7,
    }
}

impl Log {
    pub(super) fn set(&self, level: LoggingLevel) {
        self.least.store(rank(level), Ordering::Relaxed);
    }

    pub(super) async fn info(&self, context: &RequestContext<RoleServer>, text: String) {
        tracing::info!("{text}");
        self.send(context, LoggingLevel::Info, text).await;
    }

    pub(super) async fn warn(&self, context: &RequestContext<RoleServer>, text: String) {
        tracing::warn!("{text}");
        self.send(context, LoggingLevel::Warning, text).await;
    }

    async fn send(&self, context: &RequestContext<RoleServer>, level: LoggingLevel, text: String) {
        let least = context.meta.log_level().map_or_else(|| self.least.load(Ordering::Relaxed), rank);
        if rank(level) >= least && least != SILENT {
            let message = LoggingMessageNotificationParam::new(level, text.into()).with_logger("carrel");
            // A client that is gone hears nothing.
            let _ = context.peer.notify_logging_message(message).await;
        }
    }
}
