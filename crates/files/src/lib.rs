//! File operations that cannot leave their directory.
//!
//! A [`Root`] is a directory handle. Every operation below it takes a
//! [`GuestPath`](carrel_proto::files::GuestPath) and resolves it with `openat2(RESOLVE_BENEATH |
//! RESOLVE_NO_MAGICLINKS)`. The contents of the directory belong to hostile code that may change them at any
//! moment, and the caller may be root. So these hold at any time, not only when nobody else is writing:
//!
//! - No path is checked as a string and then used: the kernel resolves and opens in one step, and what follows
//!   goes through the descriptor, or through a parent's descriptor and a single name.
//! - Nothing but regular files is opened for reading or writing. Kinds are checked before the open (a device may
//!   act on being opened) and again on the descriptor (the name may have changed hands); `O_NONBLOCK` keeps a
//!   fifo or a leased file from holding us up in between.
//! - Files are replaced by renaming a finished temporary file over them, so a reader sees the old or the new one,
//!   and other names of the old file (hard links) keep their content. See `write` for the one exception.
//! - We never set setuid, setgid or sticky bits (but where user code had set them: `keep`), and give away only what we have
//!   just made.
//! - Memory and descriptors are bounded, whatever the tree looks like.
//!
//! Deliberately absent: a fallback for kernels without `openat2` (before 5.6), which would be a race; copying of
//! owners and extended attributes; anything asynchronous. Calls block, so callers in async code use a
//! blocking thread. Read [`root`](Root) first, then [`serve`].

#![forbid(unsafe_code)]

mod compare;
mod delete;
mod dirs;
mod error;
mod glob;
mod keep;
mod list;
mod read;
mod replace;
mod root;
mod scratch;
mod search;
mod serve;
mod stage;
mod text;
mod tree;
mod walk;
mod write;

pub use compare::{Comparison, Difference, Differences};
pub use error::FileError;
pub use keep::{Piece, Sight, Time};
pub use read::FileReader;
pub use root::{Owner, Root, Stamp};
pub use scratch::{Placed, Scratch};
pub use serve::serve;
pub use stage::is_temporary;
pub use tree::{LeftOut, OutsideLinks, TreeLimits, TreeReport, read_tar, write_tar};
#[cfg(feature = "zip")]
pub use tree::{read_zip, write_zip};
pub use write::{FileWriter, WriteOptions};
