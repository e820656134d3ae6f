//! `carrel doctor --prove`: attacks on real sandboxes from inside.

use std::process::ExitCode;

use carrel_engine::Engine;
use carrel_proto::problem::{Code, Problem};

pub(crate) async fn run(_engine: &Engine, _json: bool, _filter: Option<&str>) -> Result<ExitCode, Problem> {
    Err(Problem::new(Code::Unsupported, "this build has no probes"))
}
