//! The program as a user has it. Each test keeps its sandboxes in a directory of its own and closes them.

mod calls;
mod configuration;
mod copies;
mod help;
mod support;
mod survival;
mod terminals;
