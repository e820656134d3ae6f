//! Being written.

use std::sync::Arc;

use utoipa_axum::router::OpenApiRouter;

use super::Daemon;

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
}
