//! Files of a sandbox from outside: directly on the host, through the same path-safe operations as inside.

use std::path::Path;

use carrel_files::{OutsideLinks, Owner, Root, TreeLimits, read_tar, write_tar};
use carrel_jail::workspace::Kind;
use carrel_proto::{
    files::{FileReply, FileRequest, GuestPath},
    guest::Places,
    problem::{Code, Problem},
};

use rustix::fs::{Mode, OFlags};

use crate::{Engine, registry::Record};

impl Engine {
    /// The workspace of a sandbox, for streams and whole trees. `unavailable`: it is an image that nobody has mounted since its
    /// box went away; waking the sandbox does.
    pub fn files(&self, record: &Record) -> Result<Root, Problem> {
        let directory = self.directory(&record.id);
        let workspace = self.backend.workspace(&directory).ok_or_else(|| {
            Problem::new(Code::Unsupported, "files of this backend are reached through its agent")
        })?;
        open(&directory, &workspace, record)
    }

    /// One file operation.
    pub fn file(&self, record: &Record, request: FileRequest) -> Result<FileReply, Problem> {
        carrel_files::serve(&self.files(record)?, request).map_err(Into::into)
    }

    /// Copies the workspace to a new directory on the host.
    pub(crate) fn keep_workspace(&self, record: &Record, target: &Path) -> Result<(), Problem> {
        copy_out(self.files(record)?, target)
    }
}

fn open(directory: &Path, workspace: &Path, record: &Record) -> Result<Root, Problem> {
    let root = Root::open(workspace)?;
    // The empty directory below the image would swallow what is written, and show nothing of what is there.
    if record.placed.as_ref().is_some_and(|placed| placed.workspace == Kind::Image)
        && rustix::fs::fstat(&root).ok().map(|stat| stat.st_dev)
            == rustix::fs::stat(directory).ok().map(|stat| stat.st_dev)
    {
        return Err(Problem::new(Code::Unavailable, "the sandbox's files are not mounted")
            .hint("wake the sandbox: its files come back with it"));
    }
    // The agent has to know what it did not see, to put files back only where it knows all of it. Without a spool there is none.
    let witness = directory.join("spool").join(Places::OUTSIDE);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = match rustix::fs::open(witness, flags, Mode::RUSR | Mode::WUSR) {
        Ok(witness) => root.with_witness(witness),
        Err(_) => root,
    };
    Ok(match &record.placed {
        Some(placed) => root.with_owner(Owner { uid: placed.owner.0, gid: placed.owner.1 }),
        None => root,
    })
}

/// The workspace of a sandbox whose engine is another process's of the same user and host.
pub fn of_state(state: &Path, record: &Record) -> Result<Root, Problem> {
    let directory = state.join("sandboxes").join(record.id.as_str());
    open(&directory, &carrel_backend::jail::workspace_of(&directory), record)
}

/// Copies a workspace to a new directory on the host.
pub fn copy_out(root: Root, target: &Path) -> Result<(), Problem> {
    std::fs::create_dir(target)
        .map_err(|error| Problem::new(Code::InvalidArgument, format!("{}: {error}", target.display())))?;
    let kept = Root::open(target)?;
    let (reader, writer) = std::io::pipe().map_err(Problem::internal)?;
    std::thread::scope(|scope| {
        let sending =
            scope.spawn(move || write_tar(&root, &GuestPath::root(), writer, &TreeLimits::default()));
        let received =
            read_tar(&kept, &GuestPath::root(), reader, &TreeLimits::default(), OutsideLinks::LeaveOut);
        let sent = sending.join().map_err(|_| Problem::internal("copying the workspace failed"))?;
        sent?;
        received?;
        Ok(())
    })
}
