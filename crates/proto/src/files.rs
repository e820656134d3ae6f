//! File operations as they travel: one request, one reply. Whole trees and large files are streams and are not
//! here; what they share with these is [`GuestPath`] and [`Name`].
//!
//! The tag is `file`, not `op`, because these sit inside the messages that are tagged `op`.

mod bytes;
mod path;

use serde::{Deserialize, Serialize};

pub use bytes::{Content, Name};
pub use path::{GuestPath, MAX_PATH, PathError, WORKSPACE};

/// Most bytes of one read: as JSON text it can double, and must still fit a frame. Larger files are streamed.
pub const MAX_READ: u64 = 16 << 20;
/// Most entries of one page of a listing: a screenful for a machine, about 100 KiB.
pub const MAX_PAGE: u32 = 1000;
/// Most bytes of names and targets in one page, should all of them be as long as names can be.
pub const MAX_PAGE_BYTES: usize = 4 << 20;
/// Deepest directory that is walked into: each level holds one descriptor, and real trees stay below 30.
pub const MAX_DEPTH: u32 = 128;
/// Most matches of one search.
pub const MAX_MATCHES: u32 = 1000;
/// Bytes of a matching line that are returned: enough to see why it matched, minified files aside.
pub const MAX_LINE: usize = 512;
/// Largest file that is searched or replaced in unless asked for less: beyond, it is data rather than text.
pub const MAX_TEXT_FILE: u64 = 8 << 20;
/// Most files that one search or replacement looks into.
pub const MAX_SEARCHED: u64 = 100_000;
/// Largest glob, pattern or regular expression.
pub const MAX_PATTERN: usize = 4096;

/// One operation on files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "file", rename_all = "snake_case")]
pub enum FileRequest {
    Read(Read),
    Write(Write),
    List(List),
    Stat(Stat),
    Move(Move),
    Delete(Delete),
    Mkdir(Mkdir),
    Search(Search),
    Replace(Replace),
}

/// The answer to the request of the same name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "file", rename_all = "snake_case")]
pub enum FileReply {
    Read(ReadReply),
    Write(Entry),
    List(Listing),
    Stat(Entry),
    Move(Entry),
    Delete(Deleted),
    Mkdir(Entry),
    Search(Found),
    Replace(Replaced),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Read {
    pub path: GuestPath,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(maximum = 9223372036854775807usize))]
    pub offset: u64,
    /// Most bytes to return, at most [`MAX_READ`]. Without it the whole rest is meant, and a file that is too large
    /// for that is an error rather than a part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(maximum = 9223372036854775807usize))]
    pub len: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Write {
    pub path: GuestPath,
    pub data: Content,
    /// Add at the end, in place. Without it the file is replaced atomically.
    #[serde(default)]
    pub append: bool,
    /// `false`: fail with `exists` if there is anything of that name.
    #[serde(default = "yes")]
    pub overwrite: bool,
    /// Permission bits (the lowest nine; setuid, setgid and sticky are never set). Without it, those of the file
    /// that is replaced, or 0644.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(maximum = 4294967295u32))]
    pub mode: Option<u32>,
    /// Make missing directories above.
    #[serde(default)]
    pub parents: bool,
    /// Reply only when it is on the disk.
    #[serde(default)]
    pub sync: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct List {
    #[serde(default = "GuestPath::root")]
    pub path: GuestPath,
    /// 1 is the directory alone; at most [`MAX_DEPTH`].
    #[serde(default = "one")]
    #[cfg_attr(feature = "schema", schema(maximum = 4294967295u32))]
    pub depth: u32,
    /// At most [`MAX_PAGE`].
    #[serde(default = "page")]
    #[cfg_attr(feature = "schema", schema(maximum = 4294967295u32))]
    pub limit: u32,
    /// [`Listing::next`] of the page before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Name>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Stat {
    pub path: GuestPath,
    /// `true`: what a symlink leads to; `false`: the symlink itself.
    #[serde(default)]
    pub follow: bool,
}

/// Renames exactly: `to` is the new path, not a directory to move into.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Move {
    pub from: GuestPath,
    pub to: GuestPath,
    #[serde(default)]
    pub overwrite: bool,
    #[serde(default)]
    pub parents: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Delete {
    pub path: GuestPath,
    /// Directories with all that is in them. Without it only an empty one goes.
    #[serde(default)]
    pub recursive: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Mkdir {
    pub path: GuestPath,
    /// Make missing directories above, and accept one that is there already.
    #[serde(default)]
    pub parents: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(maximum = 511))]
    pub mode: Option<u32>,
}

/// By name, by content, or both. Symlinks are not followed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Search {
    #[serde(default = "GuestPath::root")]
    pub path: GuestPath,
    /// `*`, `?`, `[a-z]`, `{a,b}`, and `**` across directories. Without a slash it is matched against the name
    /// alone, else against the path below `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glob: Option<String>,
    /// Text that a line must contain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// `text` is a regular expression.
    #[serde(default)]
    pub regex: bool,
    #[serde(default)]
    pub ignore_case: bool,
    #[serde(default = "matches")]
    #[cfg_attr(feature = "schema", schema(minimum = 1, maximum = 1000))]
    pub limit: u32,
    /// Files beyond this size are counted as skipped; at most [`MAX_TEXT_FILE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(maximum = 9223372036854775807usize))]
    pub max_file: Option<u64>,
}

/// Replaces text in one file, or in all files below a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Replace {
    pub path: GuestPath,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub glob: Option<String>,
    pub find: String,
    /// With `regex`, `$1` and `${name}` stand for groups and `$$` for a dollar.
    pub with: String,
    #[serde(default)]
    pub regex: bool,
    /// Nothing is changed unless the one file has exactly this many occurrences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(maximum = 9223372036854775807usize))]
    pub expect: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    File,
    Dir,
    Symlink,
    Fifo,
    Socket,
    Device,
}

/// What is known of one file without opening it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Entry {
    /// In a listing the path below the listed directory, else the path that was asked for.
    pub name: Name,
    pub kind: Kind,
    pub size: u64,
    /// The lowest twelve bits.
    pub mode: u32,
    /// Nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Of a symlink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub target: Option<Name>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ReadReply {
    pub data: Content,
    pub offset: u64,
    /// Of the whole file when it was read.
    pub size: u64,
    /// Nothing follows `data`.
    pub eof: bool,
}

/// A page, ordered by path: component by component, bytes compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Listing {
    pub entries: Vec<Entry>,
    /// Pass as `after` for the next page; none at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub next: Option<Name>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Deleted {
    /// Files, links and directories.
    pub removed: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Match {
    /// Relative to the workspace.
    pub path: Name,
    /// From 1; none when only the name was searched for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub line: Option<u64>,
    /// At most [`MAX_LINE`] bytes around the match, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub text: Option<String>,
}

/// Files that were not looked into, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Skipped {
    pub binary: u64,
    pub too_large: u64,
    /// No permission, gone meanwhile, or beyond [`MAX_DEPTH`].
    pub unreadable: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Found {
    pub matches: Vec<Match>,
    pub files_searched: u64,
    pub skipped: Skipped,
    /// `false`: the limit on matches or on files was reached.
    pub complete: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ReplacedIn {
    pub path: Name,
    pub count: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Replaced {
    pub files: Vec<ReplacedIn>,
    pub count: u64,
    pub skipped: Skipped,
    pub complete: bool,
}

fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}
fn page() -> u32 {
    MAX_PAGE
}
fn matches() -> u32 {
    100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_strict_and_short() {
        let request: FileRequest =
            serde_json::from_str(r#"{"file":"read","path":"/workspace/a.txt"}"#).unwrap();
        let path = GuestPath::parse("a.txt").unwrap();
        assert_eq!(request, FileRequest::Read(Read { path, offset: 0, len: None }));
        for bad in [
            r#"{"file":"read","path":"a","lenght":3}"#,
            r#"{"file":"read","path":"/etc/passwd"}"#,
            r#"{"file":"read","path":""}"#,
            r#"{"file":"chmod","path":"a"}"#,
            r#"{"file":"read"}"#,
        ] {
            assert!(serde_json::from_str::<FileRequest>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_that_are_not_text_survive_inside_tagged_messages() {
        let path = GuestPath::parse(b"dir/\xff\n").unwrap();
        let request = FileRequest::Delete(Delete { path, recursive: true });
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(json, r#"{"file":"delete","path":{"base64":"ZGlyL/8K"},"recursive":true}"#);
        assert_eq!(serde_json::from_str::<FileRequest>(&json).unwrap(), request);
    }
}
