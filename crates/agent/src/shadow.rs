//! A copy of the workspace as it was at one moment, from which it can be put back.
//!
//! A [`Tree`] has every entry of the workspace: what it is, its mode and time, and of a file its content. Trees are cheap beside
//! each other: what has not changed from one to the next they share, down to the content, so that a tree per call costs what the
//! call has changed. All contents are pieces of one file without a name ([`Store`]), below the spool: user code never sees it, it
//! does not count against the workspace's own disk, and it is gone with the agent, however that ends. A content that no tree has
//! any more is a hole in that file.
//!
//! Bounds: [`Limits`], and a time for each copying. What is beyond them is not copied, with a word on why.
//!
//! Not copied, and not put back: extended attributes, and the setgid bit of a directory that only lost that bit. Not copied at all
//! is a workspace in which a file has several names.

use std::{
    cell::{Cell, OnceCell},
    collections::BTreeMap,
    fs::File,
    io,
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};

use carrel_files::{FileError, Piece, Root, Sight, Time};
use carrel_proto::files::Kind;
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, ftruncate, ioctl_ficlone, open, unlink};

use crate::changes::{self, Changes, Print, TICK_NS};

/// Pieces begin at a block's begin, so that file systems that can share blocks do.
const BLOCK: u64 = 4096;

/// To compare a file with what is to be put back: all of a workspace that is small enough can be.
const COMPARING: Duration = Duration::from_secs(5);

/// How large a workspace is copied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) entries: usize,
    /// Of all files together.
    pub(crate) bytes: u64,
    /// The same where blocks are shared and not copied.
    pub(crate) shared_bytes: u64,
    /// The store holds so many times as much: what files were before the calls that changed them.
    pub(crate) times: u64,
}

impl Limits {
    /// A copy of 16 MB takes about as long as a new interpreter.
    pub(crate) const USUAL: Self = Self { entries: 1024, bytes: 16 << 20, shared_bytes: 1 << 30, times: 4 };
}

/// Where contents are.
#[derive(Debug)]
pub(crate) struct Store {
    directory: PathBuf,
    workspace: PathBuf,
    /// Made for the first content: many a workspace never has one.
    file: OnceCell<Rc<File>>,
    end: Cell<u64>,
    used: Cell<u64>,
    /// Whether blocks are shared between the workspace and here; asked for when it matters.
    shares: OnceCell<bool>,
    limits: Limits,
}

/// A content.
#[derive(Debug)]
pub(crate) struct Content {
    store: Rc<Store>,
    file: Rc<File>,
    at: u64,
    size: u64,
}

#[derive(Debug)]
enum What {
    Directory,
    File(Rc<Content>),
    Link(Box<[u8]>),
    Fifo,
    /// A socket or a device: nothing that could be made again.
    Other,
}

/// One entry as it was.
#[derive(Debug)]
struct Kept {
    what: What,
    mode: u32,
    written: Time,
    inode: u64,
    print: Print,
    /// So young when it was copied that another change may have left it with the same time.
    racy: bool,
}

/// The workspace at one moment.
#[derive(Debug, Default)]
pub(crate) struct Tree(BTreeMap<Rc<[u8]>, Rc<Kept>>);

/// What a copying has brought.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) tree: Tree,
    /// It differs from the tree before.
    pub(crate) differs: bool,
}

/// Why there is no copy, or nothing was put back, for people to read.
pub(crate) type Reason = String;

const CHANGING: &str = "files changed while they were looked at";

fn because(what: &str, error: &FileError) -> Reason {
    match error {
        FileError::Io { source, .. } => format!("{what}: {error}: {source}"),
        _ => format!("{what}: {error}"),
    }
}

fn not_copied(error: FileError) -> Reason {
    match error {
        FileError::Changed { .. } => CHANGING.to_owned(),
        FileError::TooLarge { .. } => "the workspace takes too long to copy".to_owned(),
        _ => because("a file cannot be copied", &error),
    }
}

impl Store {
    /// Below a directory that user code does not see.
    pub(crate) fn new(directory: PathBuf, workspace: PathBuf, limits: Limits) -> Rc<Self> {
        let (file, shares) = (OnceCell::new(), OnceCell::new());
        Rc::new(Self { directory, workspace, file, end: Cell::new(0), used: Cell::new(0), shares, limits })
    }

    fn most(&self, wanted: u64) -> u64 {
        let shares = || *self.shares.get_or_init(|| shares_blocks(&self.directory, &self.workspace));
        if wanted > self.limits.bytes && shares() { self.limits.shared_bytes } else { self.limits.bytes }
    }

    /// Room for a content.
    fn reserve(self: &Rc<Self>, size: u64) -> Result<Content, Reason> {
        let room = size.next_multiple_of(BLOCK);
        let wanted = self.used.get() + room;
        let most = self.most(wanted / self.limits.times) * self.limits.times;
        if wanted > most {
            return Err(format!("what calls have changed takes more than {} MB", most >> 20));
        }
        let file = match self.file.get() {
            Some(file) => Rc::clone(file),
            None => {
                let made =
                    nameless(&self.directory).map_err(|error| format!("files cannot be copied: {error}"))?;
                Rc::clone(self.file.get_or_init(|| Rc::new(made)))
            }
        };
        if self.used.get() == 0 {
            self.end.set(0);
        }
        let content = Content { store: Rc::clone(self), file, at: self.end.get(), size };
        self.end.set(content.at + room);
        self.used.set(wanted);
        Ok(content)
    }
}

impl Content {
    fn piece(&self) -> Piece<'_> {
        Piece { file: &self.file, at: self.at, size: self.size }
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        let (store, room) = (&self.store, self.size.next_multiple_of(BLOCK));
        let left = store.used.get() - room;
        if left == 0 {
            store.used.set(0);
            let _ = ftruncate(&self.file, 0);
        } else if room > 0 {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Where there are no holes it goes on counting, until nothing is kept any more.
            if fallocate(&self.file, flags, self.at, room).is_ok() {
                store.used.set(left);
            }
        }
    }
}

/// A file that goes with its descriptor.
fn nameless(directory: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    match open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        Ok(file) => Ok(file.into()),
        // Not every file system has files that never had a name.
        Err(_) => {
            let path = directory.join("files.store");
            let _ = unlink(&path);
            let file = open(&path, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC, mode)?;
            unlink(&path)?;
            Ok(file.into())
        }
    }
}

fn shares_blocks(directory: &Path, workspace: &Path) -> bool {
    let device = |path: &Path| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
    let clones = || -> io::Result<()> {
        let (one, other) = (nameless(directory)?, nameless(directory)?);
        rustix::io::pwrite(&one, &[1; 4096], 0)?;
        Ok(ioctl_ficlone(&other, &one)?)
    };
    device(directory) == device(workspace) && clones().is_ok()
}

/// Copies what has changed since `old`, by an index that has just been taken. With `verify` contents are compared, whatever the
/// index says.
pub(crate) fn copy(
    root: &Root,
    index: &Changes,
    old: Option<&Tree>,
    verify: bool,
    store: &Rc<Store>,
    until: Instant,
) -> Result<Copied, Reason> {
    let (mut count, mut bytes) = (0, 0_u64);
    for (path, _, size) in index.there()? {
        count += 1;
        if !path.ends_with(b"/") {
            bytes = bytes.saturating_add(size);
        }
    }
    if count > store.limits.entries {
        return Err(format!("the workspace has more than {} files", store.limits.entries));
    }
    if bytes > store.most(bytes) {
        return Err(format!("the workspace is larger than {} MB", store.most(bytes) >> 20));
    }
    let mut tree = Tree::default();
    let mut differs = old.is_none_or(|old| old.0.len() != count + 1);
    let mut add = |path: &[u8], print: Option<Print>| -> Result<(), Reason> {
        let known = old.and_then(|old| old.0.get_key_value(path));
        if let Some((path, kept)) = known
            && print == Some(kept.print)
            && !kept.racy
            && !verify
        {
            tree.0.insert(Rc::clone(path), Rc::clone(kept));
            return Ok(());
        }
        let kept = take_down(root, path, print, known.map(|(_, kept)| &**kept), store, until)?;
        differs |= known.is_none_or(|(_, before)| !kept.is_as(before));
        tree.0.insert(known.map_or_else(|| path.into(), |(path, _)| Rc::clone(path)), Rc::new(kept));
        Ok(())
    };
    // The workspace itself is in no index.
    add(b"", None)?;
    for (path, print, _) in index.there()? {
        add(path, Some(print))?;
    }
    Ok(Copied { tree, differs })
}

impl Kept {
    fn is_as(&self, other: &Self) -> bool {
        let same = match (&self.what, &other.what) {
            (What::Directory, What::Directory) => true,
            (What::File(mine), What::File(theirs)) => {
                Rc::ptr_eq(mine, theirs) && self.written == other.written
            }
            (What::Link(mine), What::Link(theirs)) => mine == theirs,
            (What::Fifo, What::Fifo) | (What::Other, What::Other) => self.inode == other.inode,
            _ => false,
        };
        same && self.mode == other.mode
    }
}

fn take_down(
    root: &Root,
    path: &[u8],
    print: Option<Print>,
    before: Option<&Kept>,
    store: &Rc<Store>,
    until: Instant,
) -> Result<Kept, Reason> {
    let failed = not_copied;
    let racy = changes::now().saturating_sub(TICK_NS);
    let sight = root.sight(path).map_err(failed)?;
    let seen = Print::new(sight.inode, sight.size, sight.changed_ns);
    if print.is_some_and(|print| print != seen) {
        return Err(CHANGING.to_owned());
    }
    let what = match sight.kind {
        Kind::Dir => What::Directory,
        Kind::Symlink => What::Link(root.link_text(path).map_err(failed)?.into()),
        Kind::Fifo => What::Fifo,
        Kind::File if sight.links > 1 => return Err("a file has several names (hard links)".to_owned()),
        Kind::File => What::File(content_of(root, path, &sight, before, store, until)?),
        _ => What::Other,
    };
    Ok(Kept {
        what,
        mode: sight.mode,
        written: sight.written,
        inode: sight.inode,
        print: seen,
        racy: sight.changed_ns >= racy,
    })
}

/// The content that is kept already, if it is that.
fn content_of(
    root: &Root,
    path: &[u8],
    sight: &Sight,
    before: Option<&Kept>,
    store: &Rc<Store>,
    until: Instant,
) -> Result<Rc<Content>, Reason> {
    let failed = not_copied;
    if let Some(Kept { what: What::File(content), .. }) = before
        && content.size == sight.size
        && root.has_content(path, content.piece(), until).map_err(failed)?
    {
        return Ok(Rc::clone(content));
    }
    let content = store.reserve(sight.size)?;
    root.copy_out(path, sight, content.piece(), until).map_err(failed)?;
    Ok(Rc::new(content))
}

/// What is to be done to a name.
#[derive(Debug, Clone, Copy)]
enum Deed {
    /// It is there and differs.
    Mend,
    /// It is not there.
    Make,
}

impl Tree {
    /// Makes the workspace what it was, by an index that has just been taken; with `verify` contents are compared, whatever the index
    /// says. An error before anything was changed, or, as said in it, half-way.
    pub(crate) fn put_back(&self, root: &Root, index: &Changes, verify: bool) -> Result<(), Reason> {
        let there: BTreeMap<&[u8], Print> = index.there()?.map(|(path, print, _)| (path, print)).collect();
        let gone: Vec<&[u8]> = there.keys().copied().filter(|path| !self.0.contains_key(*path)).collect();
        let mut deeds = Vec::new();
        for (path, kept) in &self.0 {
            let deed = match there.get(&**path) {
                _ if path.is_empty() => continue,
                None => Deed::Make,
                Some(print) if *print != kept.print => Deed::Mend,
                Some(_) if kept.racy || verify => Deed::Mend,
                Some(_) => continue,
            };
            if matches!(kept.what, What::Other) {
                if there.get(&**path) == Some(&kept.print) {
                    continue;
                }
                return Err("a socket or a device cannot be made again".to_owned());
            }
            deeds.push((&**path, &**kept, deed));
        }
        if gone.is_empty() && deeds.is_empty() {
            return self.dress_directories(root).map_err(half);
        }
        let steps = || -> Result<(), FileError> {
            unlock(root, &there)?;
            // What is in a directory comes after it, and goes before it.
            for path in gone.iter().rev() {
                unchanged(root, path, there[*path])?;
                root.take_away(path, path.ends_with(b"/"))?;
            }
            for (path, kept, deed) in deeds {
                match deed {
                    Deed::Mend => kept.mend(root, path, there[path])?,
                    Deed::Make => kept.make(root, path)?,
                }
            }
            self.dress_directories(root)
        };
        steps().map_err(half)
    }

    /// Directories get their times last: whatever is made in them changes these.
    fn dress_directories(&self, root: &Root) -> Result<(), FileError> {
        for (path, kept) in self.0.iter().rev() {
            if !matches!(kept.what, What::Directory) {
                continue;
            }
            let sight = root.sight(path)?;
            if (sight.mode, sight.written) != (kept.mode, kept.written) {
                root.dress_as(path, kept.mode, Some(kept.written))?;
            }
        }
        Ok(())
    }

    /// Whether the next look has to compare contents.
    pub(crate) fn is_racy(&self) -> bool {
        self.0.values().any(|kept| kept.racy)
    }

    /// Whether the workspace has exactly these names.
    pub(crate) fn has_names_of(&self, index: &Changes) -> bool {
        index.there().is_ok_and(|there| {
            let named = self.0.keys().map(|path| &**path).filter(|path| !path.is_empty());
            there.map(|(path, ..)| path).eq(named)
        })
    }
}

fn half(error: FileError) -> Reason {
    because("not all files could be put back", &error)
}

/// User code may have taken its own rights to directories away.
fn unlock(root: &Root, there: &BTreeMap<&[u8], Print>) -> Result<(), FileError> {
    let below = there.keys().copied().filter(|path| path.ends_with(b"/"));
    for path in std::iter::once(&b""[..]).chain(below) {
        let mode = root.sight(path)?.mode;
        if mode & 0o700 != 0o700 {
            root.dress_as(path, mode | 0o700, None)?;
        }
    }
    Ok(())
}

/// Nothing is removed or overwritten that is another file than the one that was looked at. Its time may be another: removing one
/// name of a file changes that of all others.
fn unchanged(root: &Root, path: &[u8], print: Print) -> Result<Sight, FileError> {
    let sight = root.sight(path)?;
    let is_directory = sight.kind == Kind::Dir;
    if is_directory || Print::new(sight.inode, sight.size, sight.changed_ns).is_of(print) {
        return Ok(sight);
    }
    Err(FileError::Changed { path: String::from_utf8_lossy(path).into_owned() })
}

impl Kept {
    fn mend(&self, root: &Root, path: &[u8], print: Print) -> Result<(), FileError> {
        let sight = unchanged(root, path, print)?;
        match &self.what {
            What::Directory | What::Other => Ok(()),
            What::Fifo if sight.kind == Kind::Fifo => root.dress_as(path, self.mode, Some(self.written)),
            What::Link(text) if sight.kind == Kind::Symlink && *root.link_text(path)? == **text => Ok(()),
            // The same file for whoever has it open, unless a call has given it another name.
            What::File(content)
                if sight.kind == Kind::File && sight.inode == self.inode && sight.links == 1 =>
            {
                if (sight.mode, sight.written) == (self.mode, self.written)
                    && root.has_content(path, content.piece(), Instant::now() + COMPARING)?
                {
                    return Ok(());
                }
                root.put_content(path, content.piece(), self.mode, self.written)
            }
            _ => {
                root.take_away(path, false)?;
                self.make(root, path)
            }
        }
    }

    fn make(&self, root: &Root, path: &[u8]) -> Result<(), FileError> {
        match &self.what {
            What::Directory => root.put_empty(path, Kind::Dir, self.mode),
            What::File(content) => root.put_file(path, content.piece(), self.mode, self.written),
            What::Link(text) => root.put_link(path, text, self.written),
            What::Fifo => {
                root.put_empty(path, Kind::Fifo, self.mode)?;
                root.dress_as(path, self.mode, Some(self.written))
            }
            What::Other => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
