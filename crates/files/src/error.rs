//! What can go wrong, in few kinds. Messages carry the path, escaped, and are fragments for a caller's eyes.

use std::io;

use carrel_proto::{
    files::{GuestPath, Name, PathError},
    problem::{Code, Problem},
};
use rustix::io::Errno;

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{path} leads outside the workspace")]
    PathOutside { path: String },
    #[error("{path} does not exist")]
    NotFound { path: String },
    #[error("{path} exists already")]
    Exists { path: String },
    #[error("{path} is not the one that was meant: it was written, made or removed meanwhile")]
    Changed { path: String },
    #[error("{path} is not a directory")]
    NotADirectory { path: String },
    #[error("{path} is a directory")]
    IsADirectory { path: String },
    #[error("{path} is not a regular file")]
    NotARegularFile { path: String },
    #[error("{path} is not empty")]
    NotEmpty { path: String },
    #[error("{path} is too large: {what}")]
    TooLarge { path: String, what: String },
    #[error("no space left for {path}")]
    NoSpace { path: String },
    #[error("no permission for {path}")]
    Permission { path: String },
    #[error("{path} is not a usable path: {what}")]
    InvalidPath { path: String, what: &'static str },
    #[error("{what}")]
    InvalidArgument { what: String },
    #[error("{what}")]
    Unsupported { what: &'static str },
    #[error("{path}")]
    Io {
        path: String,
        #[source]
        source: io::Error,
    },
}

impl FileError {
    /// The stable name on the wire.
    pub fn code(&self) -> &'static str {
        match self {
            Self::PathOutside { .. } => "path_outside",
            Self::NotFound { .. } => "not_found",
            Self::Exists { .. } => "exists",
            Self::Changed { .. } => "precondition_failed",
            Self::NotADirectory { .. } => "not_a_directory",
            Self::IsADirectory { .. } => "is_a_directory",
            Self::NotARegularFile { .. } => "not_a_regular_file",
            Self::NotEmpty { .. } => "not_empty",
            Self::TooLarge { .. } => "too_large",
            Self::NoSpace { .. } => "no_space",
            Self::Permission { .. } => "permission",
            Self::InvalidPath { .. } => "invalid_path",
            Self::InvalidArgument { .. } => "invalid_argument",
            Self::Unsupported { .. } => "unsupported",
            Self::Io { .. } => "io",
        }
    }

    /// What the caller can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::PathOutside { .. } => "use a path relative to /workspace, or an absolute one inside it",
            Self::NotFound { .. } => {
                "list the directory to see what is there, or pass parents=true to create it"
            }
            Self::Exists { .. } => "choose another name, or pass overwrite=true",
            Self::Changed { .. } => "read it again, and decide anew",
            Self::NotADirectory { .. } => {
                "a part of the path is a file or a link; list its parent to see which"
            }
            Self::IsADirectory { .. } => "name a file in it, or list it",
            Self::NotARegularFile { .. } => {
                "fifos, sockets and devices can be listed, moved and deleted only"
            }
            Self::NotEmpty { .. } => {
                "pass recursive=true to delete what is in it; if so already, stop its writers"
            }
            Self::TooLarge { .. } => "read a range, or download it as a stream",
            Self::NoSpace { .. } => "delete files, or raise the sandbox's disk limit",
            Self::Permission { .. } => "change its mode from inside the sandbox",
            Self::InvalidPath { .. } => "name a file or directory below /workspace",
            Self::InvalidArgument { .. } => "correct the request",
            Self::Unsupported { .. } => "see carrel doctor for what this host lacks",
            Self::Io { .. } => "try again; if it persists, look at the host's disk",
        }
    }

    /// For streams: what the operating system said while `path` was being read or written.
    pub fn from_io(path: &GuestPath, error: io::Error) -> Self {
        Self::io(path, error)
    }

    pub(crate) fn io(path: impl ToString, error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => Self::at(path, errno),
            None => Self::Io { path: path.to_string(), source: error },
        }
    }

    pub(crate) fn at(path: impl ToString, errno: Errno) -> Self {
        let path = path.to_string();
        match errno {
            Errno::XDEV => Self::PathOutside { path },
            Errno::NOENT => Self::NotFound { path },
            Errno::EXIST => Self::Exists { path },
            Errno::NOTDIR => Self::NotADirectory { path },
            Errno::ISDIR => Self::IsADirectory { path },
            Errno::NOTEMPTY => Self::NotEmpty { path },
            // No such device: what opening a socket, or a fifo without readers, answers.
            Errno::NXIO | Errno::NODEV => Self::NotARegularFile { path },
            Errno::FBIG | Errno::OVERFLOW => {
                Self::TooLarge { path, what: "beyond the file system's bound".into() }
            }
            Errno::NOSPC | Errno::DQUOT => Self::NoSpace { path },
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::Permission { path },
            Errno::LOOP => Self::InvalidPath { path, what: "a symlink where none may be, or too many" },
            Errno::NAMETOOLONG => Self::InvalidPath { path, what: "a name is too long" },
            Errno::NOSYS => Self::Unsupported { what: "this kernel or its seccomp filter lacks openat2" },
            other => Self::Io { path, source: other.into() },
        }
    }

    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::InvalidArgument { what: what.into() }
    }

    /// A path that could not even be parsed.
    pub fn from_path(path: &[u8], error: PathError) -> Self {
        let path = Name::from(path).to_string();
        match error {
            PathError::Outside => Self::PathOutside { path },
            PathError::Empty => Self::InvalidPath { path, what: "it is empty" },
            PathError::Nul => Self::InvalidPath { path, what: "it contains a zero byte" },
            PathError::TooLong => {
                Self::InvalidPath { path: "…".into(), what: "it is longer than 4095 bytes" }
            }
        }
    }
}

impl From<FileError> for Problem {
    fn from(error: FileError) -> Self {
        let code = match &error {
            FileError::PathOutside { .. } => Code::PathOutside,
            FileError::NotFound { .. } => Code::NotFound,
            FileError::Exists { .. } => Code::Exists,
            FileError::Changed { .. } => Code::PreconditionFailed,
            FileError::NotADirectory { .. } => Code::NotADirectory,
            FileError::IsADirectory { .. } => Code::IsADirectory,
            FileError::NotARegularFile { .. } => Code::NotARegularFile,
            FileError::TooLarge { .. } => Code::TooLarge,
            FileError::NoSpace { .. } => Code::Disk,
            FileError::Permission { .. } => Code::Permission,
            FileError::NotEmpty { .. } => Code::NotEmpty,
            FileError::InvalidPath { .. } | FileError::InvalidArgument { .. } => Code::InvalidArgument,
            FileError::Unsupported { .. } => Code::Unsupported,
            FileError::Io { .. } => Code::Internal,
        };
        let message = match &error {
            FileError::Io { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        };
        Problem::new(code, message).hint(error.hint())
    }
}
