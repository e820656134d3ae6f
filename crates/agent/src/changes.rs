//! What changed below the workspace: an index of it, taken anew when a call ends.
//!
//! Nothing tells the agent of changes: inotify would, but closing its queue waits in the kernel (11 ms were seen), and its
//! watches are charged to the host's user. So the tree is walked, and what the kernel says of every entry (inode, size, time of
//! its last change, which no code can set) is compared with the walk before. Each walk has a number, and every entry the numbers
//! of the walks that first saw it and that last found it changed, so that calls which overlap are each told of all that happened
//! between their own begin and end, without a list per call.
//!
//! What happens between calls belongs to none. When one begins, only the directories are looked at: a name that came or
//! went changes its directory's time, and then the whole is walked. A file that was written to in between is found
//! when the call ends, and its time says that it was before.
//!
//! Bounds: a workspace with more than [`MOST_ENTRIES`], or one that takes longer than [`LONGEST`] to walk, is not followed, and
//! receipts say so; it is looked at again after a while. A file that is written twice within one tick of the kernel's
//! coarse clock, with the same size, in two calls, is missed in the second where the kernel has no finer times (before 6.13).

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    time::{Duration, Instant},
};

use carrel_proto::outcome::{FileChanges, MAX_NAME, MAX_NAMES};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxFlags, open, openat2, statx},
    io::Errno,
    time::{ClockId, clock_gettime},
};

/// About 2 MB of names.
const MOST_ENTRIES: usize = 20_000;
/// On the path of every call.
const LONGEST: Duration = Duration::from_millis(5);
/// The first look, at a box that is only being made, may take longer than one on the path of a call.
const LONGEST_FIRST: Duration = Duration::from_millis(20);
/// Between two attempts at a workspace that is too large.
const AGAIN: Duration = Duration::from_secs(10);
/// Removed names that are remembered for the brief.
const MOST_REMOVED: usize = 1000;
/// Entries between two looks at the clock.
const STRIDE: usize = 64;
/// What getdents fills at once.
const BUFFER: usize = 8 << 10;
/// Times are taken from a clock that stands still for so long: a directory that changed this recently may change again without
/// a trace.
pub(crate) const TICK_NS: u64 = 10_000_000;

/// Where in the history of walks a call began.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mark {
    walk: u32,
    /// By the clock that the kernel stamps files with.
    time: u64,
    /// Whether all was known then.
    known: bool,
}

/// What tells one content of an entry from the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Print {
    /// Of its last change.
    pub(crate) time: u64,
    /// Inode and size.
    mix: u64,
}

impl Print {
    pub(crate) fn new(inode: u64, size: u64, time: u64) -> Self {
        Self { time, mix: inode.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ size }
    }

    /// Whether it is the same file, of the same size.
    pub(crate) fn is_of(&self, other: Self) -> bool {
        self.mix == other.mix
    }
}

#[derive(Debug)]
struct Entry {
    print: Print,
    size: u64,
    born: u32,
    changed: u32,
    /// The last walk that saw it.
    seen: u32,
    /// The walk that missed it first; 0: it is there.
    gone: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Changes {
    path: String,
    /// By path relative to the workspace; directories end with `/`.
    entries: BTreeMap<Box<[u8]>, Entry>,
    /// Directories and when a name last came or went; racy ones have 0. The first is the workspace.
    directories: Vec<(Box<[u8]>, u64)>,
    walk: u32,
    removed: usize,
    /// Why nothing is known, and when to try again.
    unknown: Option<(&'static str, Instant)>,
    /// Since when all of it is known.
    since: u32,
    /// The last walk that found something else than the one before.
    moved: u32,
}

/// Why a walk was given up.
enum Stop {
    Many,
    Long,
    Deep,
}

impl Stop {
    fn as_str(&self) -> &'static str {
        match self {
            Stop::Many => "the workspace has too many files to follow",
            Stop::Long => "the workspace takes too long to look through",
            Stop::Deep => "the workspace has paths that are too long",
        }
    }
}

impl Changes {
    /// Takes the first look.
    pub(crate) fn new(path: String) -> Self {
        let mut changes = Self { path, ..Self::default() };
        changes.look(LONGEST_FIRST);
        changes
    }

    /// A call begins. What changed before is nobody's.
    pub(crate) fn begin(&mut self) -> Mark {
        let time = now();
        if self.unknown.is_some_and(|(_, again)| again <= Instant::now()) || !self.is_current() {
            self.look(LONGEST);
        }
        Mark { walk: self.walk, time, known: self.unknown.is_none() }
    }

    /// A call ends.
    pub(crate) fn end(&mut self, mark: Mark) -> FileChanges {
        if self.unknown.is_none() {
            self.look(LONGEST);
        }
        match self.unknown {
            Some((reason, _)) => FileChanges::unknown(reason),
            None if !mark.known || self.since > mark.walk => {
                FileChanges::unknown("the workspace was too large when the call began")
            }
            None => self.since(mark),
        }
    }

    /// All that changed since the first look, whoever did it.
    pub(crate) fn all(&mut self) -> FileChanges {
        if self.unknown.is_none() {
            self.look(LONGEST);
        }
        match self.unknown {
            Some((reason, _)) => FileChanges::unknown(reason),
            None => {
                let mut changes = self.since(Mark { walk: self.since, time: 0, known: true });
                if self.since > 1 {
                    changes.complete = false;
                    changes.reason = Some("known only since the workspace became small enough".into());
                }
                changes
            }
        }
    }

    /// Names of removed entries that nobody asks for any more.
    pub(crate) fn forget(&mut self, anyone_runs: bool) {
        if !anyone_runs && self.removed > MOST_REMOVED {
            self.entries.retain(|_, entry| entry.gone == 0);
            self.removed = 0;
        }
    }

    /// Takes a look out of turn; what it finds is told to the calls that run.
    pub(crate) fn refresh(&mut self, longest: Duration) {
        self.look(longest);
    }

    /// The last walk that found something else than the one before.
    pub(crate) fn moved(&self) -> u32 {
        self.moved
    }

    /// What was there at the last walk, by path, with its size; or why that is not known.
    pub(crate) fn there(&self) -> Result<impl Iterator<Item = (&[u8], Print, u64)>, &'static str> {
        match self.unknown {
            Some((reason, _)) => Err(reason),
            None => Ok(self
                .entries
                .iter()
                .filter(|(_, entry)| entry.gone == 0)
                .map(|(path, entry)| (&**path, entry.print, entry.size))),
        }
    }

    fn since(&self, mark: Mark) -> FileChanges {
        let mut found = FileChanges::default();
        for (path, entry) in &self.entries {
            let old = entry.born <= mark.walk;
            let (list, count) = match entry.gone {
                0 if !old => (&mut found.added, &mut found.added_count),
                0 if entry.changed > mark.walk && entry.print.time >= mark.time && !path.ends_with(b"/") => {
                    (&mut found.changed, &mut found.changed_count)
                }
                gone if old && gone > mark.walk => (&mut found.removed, &mut found.removed_count),
                _ => continue,
            };
            *count += 1;
            if list.len() < MAX_NAMES {
                list.push(shown(path));
            }
        }
        found
    }

    /// Whether no name came or went since the last walk.
    fn is_current(&self) -> bool {
        if self.unknown.is_some() {
            // There is nothing to compare with, until the time has come to try again.
            return true;
        }
        let Ok(root) = workspace(&self.path) else { return false };
        self.directories.iter().all(|(path, time)| {
            let path = if path.is_empty() { &b"."[..] } else { path };
            // Through no link: one that took a directory's place is no directory, and has another time.
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            *time != 0
                && statx(&root, path, flags, StatxFlags::MTIME)
                    .is_ok_and(|stat| stamp(stat.stx_mtime) == *time)
        })
    }

    fn look(&mut self, longest: Duration) {
        self.walk += 1;
        match self.walk(Instant::now() + longest) {
            Ok(()) => {
                if self.unknown.take().is_some() || self.since == 0 {
                    // All that is there now was there before anyone asked.
                    self.since = self.walk;
                }
            }
            Err(stop) => {
                self.moved = self.walk;
                self.entries = BTreeMap::new();
                self.directories = Vec::new();
                self.removed = 0;
                self.unknown = Some((stop.as_str(), Instant::now() + AGAIN));
            }
        }
    }

    fn walk(&mut self, deadline: Instant) -> Result<(), Stop> {
        // What was stamped in this tick may be stamped once more.
        let racy = now().saturating_sub(TICK_NS);
        let mut buffer = [const { MaybeUninit::uninit() }; BUFFER];
        let mut directories: Vec<(Box<[u8]>, u64)> = Vec::with_capacity(self.directories.len().max(1));
        let mut todo: Vec<Box<[u8]>> = vec![Box::default()];
        let mut path: Vec<u8> = Vec::new();
        let mut there = 0;
        let root = workspace(&self.path);
        while let Some(directory) = todo.pop() {
            let held;
            let opened = match &root {
                Ok(root) if directory.is_empty() => Ok(root),
                Ok(root) => {
                    held = below(root, &directory);
                    held.as_ref().map_err(|error| *error)
                }
                Err(error) => Err(*error),
            };
            let opened = match opened {
                Ok(opened) => opened,
                Err(Errno::NAMETOOLONG) => return Err(Stop::Deep),
                // Gone since its name was read, or not ours to read.
                Err(_) => continue,
            };
            let time = statx(opened, c"", AtFlags::EMPTY_PATH, StatxFlags::MTIME)
                .map_or(0, |stat| stamp(stat.stx_mtime));
            directories.push((directory.clone(), if time < racy { time } else { 0 }));
            let mut names = RawDir::new(opened, &mut buffer);
            while let Some(Ok(name)) = names.next() {
                let bytes = name.file_name().to_bytes();
                if matches!(bytes, b"." | b"..") {
                    continue;
                }
                there += 1;
                if there > MOST_ENTRIES {
                    return Err(Stop::Many);
                }
                if there % STRIDE == 0 && Instant::now() >= deadline {
                    return Err(Stop::Long);
                }
                let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE | StatxFlags::CTIME;
                let Ok(stat) = statx(opened, name.file_name(), AtFlags::SYMLINK_NOFOLLOW, wanted) else {
                    continue;
                };
                path.clear();
                path.extend_from_slice(&directory);
                path.extend_from_slice(bytes);
                if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory {
                    path.push(b'/');
                    todo.push(path.as_slice().into());
                }
                self.note(&path, &stat);
            }
        }
        for entry in self.entries.values_mut() {
            if entry.gone == 0 && entry.seen != self.walk {
                entry.gone = self.walk;
                self.moved = self.walk;
                self.removed += 1;
            }
        }
        if self.entries.len() > 2 * MOST_ENTRIES {
            // Names that came and went while something runs that may still be told of them.
            return Err(Stop::Many);
        }
        self.directories = directories;
        Ok(())
    }

    fn note(&mut self, path: &[u8], stat: &Statx) {
        let walk = self.walk;
        // A directory's size and time follow its names.
        let print = Print::new(stat.stx_ino, stat.stx_size, stamp(stat.stx_ctime));
        let size = stat.stx_size;
        match self.entries.get_mut(path) {
            None => {
                let entry = Entry { print, size, born: walk, changed: walk, seen: walk, gone: 0 };
                self.entries.insert(path.into(), entry);
                self.moved = walk;
            }
            Some(entry) => {
                if entry.gone != 0 {
                    self.removed -= 1;
                }
                if entry.gone != 0 || entry.print != print {
                    entry.changed = walk;
                    self.moved = walk;
                }
                (entry.print, entry.size, entry.seen, entry.gone) = (print, size, walk, 0);
            }
        }
    }
}

/// The time that the kernel would stamp a file with now.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::RealtimeCoarse);
    nanoseconds(time.tv_sec, u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn stamp(time: rustix::fs::StatxTimestamp) -> u64 {
    nanoseconds(time.tv_sec, time.tv_nsec)
}

fn nanoseconds(seconds: i64, nanos: u32) -> u64 {
    u64::try_from(seconds).unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.into())
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn workspace(path: &str) -> Result<OwnedFd, Errno> {
    open(path, DIRECTORY, Mode::empty())
}

/// A directory of the workspace; never one outside, whatever user code puts in the way meanwhile.
fn below(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { &b"."[..] } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    openat2(root, OsStr::from_bytes(path), DIRECTORY, Mode::empty(), resolve)
}

/// A name as a receipt has it: printable, and of a bounded length.
pub(crate) fn shown(path: &[u8]) -> String {
    let mut text = String::new();
    for chunk in path.utf8_chunks() {
        for char in chunk.valid().chars() {
            if char.is_control() {
                text.extend(char.escape_default());
            } else {
                text.push(char);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    if text.len() <= MAX_NAME {
        return text;
    }
    let half = MAX_NAME / 2 - 2;
    let head = (0..=half).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let tail = (text.len() - half..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    format!("{}…{}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, path::Path};

    use super::*;

    /// As if the clock that stamps files had moved on.
    fn settle() {
        let before = now();
        while now() == before {
            std::thread::yield_now();
        }
    }

    fn changes(directory: &Path) -> Changes {
        Changes::new(directory.to_str().expect("UTF-8").to_owned())
    }

    fn lists(found: &FileChanges) -> [Vec<&str>; 3] {
        [&found.added, &found.changed, &found.removed].map(|list| list.iter().map(String::as_str).collect())
    }

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    #[test]
    fn a_call_is_told_of_what_came_changed_and_went() {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        for name in ["keep", "edit", "sub/old"] {
            fs::write(at(name), "1").unwrap();
        }
        let mut changes = changes(dir.path());
        settle();
        let mark = changes.begin();
        fs::write(at("edit"), "22").unwrap();
        fs::write(at("sub/new"), "1").unwrap();
        fs::remove_file(at("sub/old")).unwrap();
        symlink("/etc", at("link")).unwrap();
        fs::create_dir(at("empty")).unwrap();
        let found = changes.end(mark);
        assert_eq!(lists(&found), [vec!["empty/", "link", "sub/new"], vec!["edit"], vec!["sub/old"]]);
        assert_eq!((found.added_count, found.changed_count, found.removed_count), (3, 1, 1));
        assert!(found.complete && found.reason.is_none());
        settle();
        let mark = changes.begin();
        assert_eq!(changes.end(mark), FileChanges::default(), "nothing happened since");
    }

    #[test]
    fn what_happens_between_calls_is_nobodys() {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        for name in ["old", "edited"] {
            fs::write(at(name), "1").unwrap();
        }
        let mut changes = changes(dir.path());
        settle();
        let mark = changes.begin();
        changes.end(mark);
        settle();
        fs::write(at("edited"), "other").unwrap();
        fs::write(at("uploaded"), "1").unwrap();
        fs::remove_file(at("old")).unwrap();
        settle();
        let mark = changes.begin();
        fs::write(at("uploaded"), "22").unwrap();
        let found = changes.end(mark);
        assert_eq!(lists(&found), [vec![], vec!["uploaded"], vec![]]);
        let all = changes.all();
        assert_eq!(lists(&all), [vec!["uploaded"], vec!["edited"], vec!["old"]], "the brief knows all of it");
    }

    #[test]
    fn calls_that_overlap_are_each_told_of_all_that_happened_meanwhile() {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        let mut changes = changes(dir.path());
        settle();
        let long = changes.begin();
        fs::write(at("first"), "1").unwrap();
        settle();
        let short = changes.begin();
        fs::write(at("second"), "1").unwrap();
        assert_eq!(lists(&changes.end(short))[0], ["second"]);
        fs::remove_file(at("first")).unwrap();
        let again = changes.begin();
        assert_eq!(changes.end(again).total(), 0);
        assert_eq!(
            lists(&changes.end(long)),
            [vec!["second"], vec![], vec![]],
            "what came and went is nothing"
        );
    }

    #[test]
    fn a_file_that_is_replaced_has_changed() {
        let dir = scratch();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "1").unwrap();
        let mut changes = changes(dir.path());
        settle();
        let mark = changes.begin();
        fs::write(at("b"), "2").unwrap();
        fs::rename(at("b"), at("a")).unwrap();
        assert_eq!(lists(&changes.end(mark)), [vec![], vec!["a"], vec![]]);
        let mark = changes.begin();
        fs::rename(at("a"), at("c")).unwrap();
        assert_eq!(lists(&changes.end(mark)), [vec!["c"], vec![], vec!["a"]]);
    }

    #[test]
    fn lists_are_capped_and_counts_are_not() {
        let dir = scratch();
        let mut changes = changes(dir.path());
        settle();
        let mark = changes.begin();
        for n in 0..MAX_NAMES + 7 {
            fs::write(dir.path().join(format!("{n:03}")), "").unwrap();
        }
        let found = changes.end(mark);
        assert_eq!(found.added.len(), MAX_NAMES);
        assert_eq!(found.added_count, MAX_NAMES as u64 + 7);
    }

    #[test]
    fn names_are_shown_as_text_of_a_bounded_length() {
        assert_eq!(shown(b"a b/\xffc"), "a b/\\xffc");
        assert_eq!(shown(b"a\nb\x1b"), "a\\nb\\u{1b}");
        let long = shown("ä".repeat(300).as_bytes());
        assert!(long.len() <= MAX_NAME && long.contains('…'), "{long}");
    }

    #[test]
    fn a_workspace_that_is_too_large_is_said_to_be_so() {
        let dir = scratch();
        let mut changes = changes(dir.path());
        let mark = changes.begin();
        fs::write(dir.path().join("a"), "").unwrap();
        // As long as it takes to give up at once.
        for n in 0..STRIDE {
            fs::write(dir.path().join(format!("{n}")), "").unwrap();
        }
        changes.look(Duration::ZERO);
        let found = changes.end(mark);
        assert!(!found.complete && found.total() == 0, "{found:?}");
        assert!(found.reason.is_some_and(|reason| reason.contains("too long")));
        // Small enough again: what began before cannot be told, what begins now can.
        changes.unknown = changes.unknown.map(|(reason, _)| (reason, Instant::now()));
        let next = changes.begin();
        assert!(!changes.end(mark).complete);
        fs::write(dir.path().join("b"), "").unwrap();
        assert_eq!(lists(&changes.end(next))[0], ["b"]);
        assert!(!changes.all().complete);
    }

    #[test]
    fn a_link_leads_nowhere() {
        let (dir, outside) = (scratch(), scratch());
        fs::write(outside.path().join("secret"), "").unwrap();
        symlink(outside.path(), dir.path().join("link")).unwrap();
        let mut changes = changes(dir.path());
        assert_eq!(changes.entries.len(), 1);
        let root = workspace(&changes.path).unwrap();
        assert!(below(&root, b"link").is_err() && below(&root, b"..").is_err());
        fs::remove_dir_all(dir.path()).unwrap();
        let mark = changes.begin();
        assert_eq!(changes.end(mark).total(), 0, "a workspace that is gone is an empty one");
    }
}
