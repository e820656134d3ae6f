//! `carrel mcp`: serves agents, or writes itself into an agent's configuration.

mod install;
mod relay;
mod serve;

pub(crate) use install::run as install;
pub(crate) use serve::run as serve;
