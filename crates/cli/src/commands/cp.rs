//! `carrel cp`: files and trees between host and sandbox, as streams.
//!
//! Both sides go through `carrel-files`, so what a sandbox has planted (links, fifos, odd names) can neither lead a copy
//! out of the workspace nor out of the host directory that it was meant for.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read, Write},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    process::ExitCode,
};

use carrel_files::{
    FileError, OutsideLinks, Root, TreeLimits, TreeReport, WriteOptions, read_tar, write_tar,
};
use carrel_proto::{
    files::{GuestPath, Kind},
    problem::{Code, Problem},
};
use serde_json::json;

use crate::{
    args::Cp, commands::files::guest_path, context::Context, output::Output, progress::Progress,
    target::Target,
};

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side {
    Host(PathBuf),
    Sandbox { target: Target, path: OsString },
    Stream,
}

pub(crate) async fn run(args: &Cp, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let (source, target) = (Side::parse(&args.source)?, Side::parse(&args.target)?);
    let to_stdout = target == Side::Stream;
    let report = match (source, target) {
        (Side::Sandbox { target, path }, there) if !matches!(there, Side::Sandbox { .. }) => {
            let root = open(&target, context).await?;
            let _progress = Progress::start(context.output, "copying");
            Copy { root, path, recursive: args.recursive }.download(&there)?
        }
        (here, Side::Sandbox { target, path }) if !matches!(here, Side::Sandbox { .. }) => {
            let root = open(&target, context).await?;
            let _progress = Progress::start(context.output, "copying");
            Copy { root, path, recursive: args.recursive }.upload(&here)?
        }
        _ => {
            return Err(Problem::new(Code::InvalidArgument, "exactly one side must be in a sandbox")
                .hint("write it as NAME:PATH; a host path with a colon as ./PATH"));
        }
    };
    tell(&report, to_stdout, context.output)?;
    Ok(ExitCode::SUCCESS)
}

async fn open(target: &Target, context: &Context<'_>) -> Result<Root, Problem> {
    let record = context.for_files(target).await?;
    context.desk.files(&record)
}

impl Side {
    /// `NAME:PATH` unless a slash comes before the colon, as with `scp`.
    fn parse(text: &OsStr) -> Result<Self, Problem> {
        // By that name a file behind stdout would be replaced instead of written to.
        if text == "-" || text == "/dev/stdout" {
            return Ok(Side::Stream);
        }
        let bytes = text.as_bytes();
        let Some(colon) = bytes.iter().position(|byte| *byte == b':') else {
            return Ok(Side::Host(text.into()));
        };
        if bytes[..colon].contains(&b'/') {
            return Ok(Side::Host(text.into()));
        }
        let bad = |why: String| {
            Problem::new(Code::InvalidArgument, why)
                .hint("write NAME:PATH; a host path with a colon as ./PATH")
        };
        let name = String::from_utf8_lossy(&bytes[..colon]);
        let target = name.parse().map_err(bad)?;
        let path = match &bytes[colon + 1..] {
            b"" => b".".to_vec(),
            path => path.to_vec(),
        };
        Ok(Side::Sandbox { target, path: OsString::from_vec(path) })
    }
}

/// The sandbox's side of a copy.
struct Copy {
    root: Root,
    path: OsString,
    recursive: bool,
}

impl Copy {
    fn kind(&self, path: &GuestPath) -> Result<Option<Kind>, Problem> {
        match self.root.stat(path, true) {
            Ok(entry) => Ok(Some(entry.kind)),
            Err(FileError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn upload(&self, from: &Side) -> Result<TreeReport, Problem> {
        let path = guest_path(&self.path)?;
        let Side::Host(source) = from else {
            let mut stdin = io::stdin().lock();
            if self.recursive {
                return Ok(read_tar(
                    &self.root,
                    &path,
                    stdin,
                    &TreeLimits::default(),
                    OutsideLinks::LeaveOut,
                )?);
            }
            return self.write(&path, &mut stdin, None);
        };
        let meta = std::fs::metadata(source).map_err(|error| host(source, error))?;
        let into = self.path.as_bytes().ends_with(b"/") || self.kind(&path)? == Some(Kind::Dir);
        let contents_only = ends_in_dot(source.as_os_str());
        let path = match base_name(source) {
            Some(name) if into && !contents_only => path
                .join(name.as_bytes())
                .map_err(|error| Problem::new(Code::InvalidArgument, error.to_string()))?,
            _ => path,
        };
        if meta.is_dir() {
            self.directories_wanted(&source.display().to_string())?;
            let tree = Root::open(source)?;
            return transfer(&tree, &GuestPath::root(), &self.root, &path);
        }
        let mut file = File::open(source).map_err(|error| host(source, error))?;
        self.write(&path, &mut file, Some(meta.permissions().mode() & 0o777))
    }

    fn write(&self, path: &GuestPath, from: &mut dyn Read, mode: Option<u32>) -> Result<TreeReport, Problem> {
        let mut writer =
            self.root.writer(path, WriteOptions { mode, parents: true, ..Default::default() })?;
        let bytes = io::copy(from, &mut writer).map_err(|error| FileError::from_io(path, error))?;
        writer.commit()?;
        Ok(TreeReport { files: 1, bytes, ..Default::default() })
    }

    fn directories_wanted(&self, what: &str) -> Result<(), Problem> {
        if self.recursive {
            return Ok(());
        }
        Err(Problem::new(Code::IsADirectory, format!("{what} is a directory"))
            .hint("copy directories with -r"))
    }

    fn download(&self, to: &Side) -> Result<TreeReport, Problem> {
        let path = guest_path(&self.path)?;
        let entry = self.root.stat(&path, true)?;
        let Side::Host(target) = to else {
            let mut stdout = File::from(rustix::io::dup(rustix::stdio::stdout()).map_err(Problem::internal)?);
            if self.recursive {
                return Ok(write_tar(&self.root, &path, stdout, &TreeLimits::default())?);
            }
            return cat(&self.root, &path, &mut stdout);
        };
        let name = match path.split() {
            Some((_, name)) if name != b".." => OsStr::from_bytes(name).to_owned(),
            _ => OsString::from("workspace"),
        };
        let into = target.is_dir() || target.as_os_str().as_bytes().ends_with(b"/");
        let target = if into && !ends_in_dot(&self.path) { target.join(name) } else { target.clone() };
        if entry.kind == Kind::Dir {
            self.directories_wanted(&path.to_string())?;
            std::fs::create_dir_all(&target).map_err(|error| host(&target, error))?;
            let there = Root::open(&target)?;
            return transfer(&self.root, &path, &there, &GuestPath::root());
        }
        self.save(&path, &target)
    }

    /// A file, atomically: at its old place stays the old one until the new one is whole.
    fn save(&self, path: &GuestPath, target: &Path) -> Result<TreeReport, Problem> {
        let mut reader = self.root.reader(path)?;
        let mode = reader.entry().mode & 0o777;
        // What the user's own link leads to is what the user means.
        let target = std::fs::canonicalize(target).unwrap_or_else(|_| target.to_path_buf());
        let is_special = std::fs::metadata(&target).is_ok_and(|meta| !meta.is_file());
        let bytes = if is_special {
            let mut file = File::options().write(true).open(&target).map_err(|error| host(&target, error))?;
            io::copy(&mut reader, &mut file).map_err(|error| host(&target, error))?
        } else {
            let parent =
                target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let name = target.file_name().ok_or_else(|| {
                Problem::new(Code::InvalidArgument, format!("{} has no file name", target.display()))
            })?;
            let there = Root::open(parent)?;
            let name = GuestPath::parse(name.as_bytes())
                .map_err(|error| Problem::new(Code::InvalidArgument, error.to_string()))?;
            let mut writer = there.writer(&name, WriteOptions { mode: Some(mode), ..Default::default() })?;
            let bytes = io::copy(&mut reader, &mut writer).map_err(|error| host(&target, error))?;
            writer.commit()?;
            bytes
        };
        Ok(TreeReport { files: 1, bytes, ..Default::default() })
    }
}

/// A whole file to a stream. A reader that has seen enough is no failure.
pub(crate) fn cat(root: &Root, path: &GuestPath, out: &mut impl Write) -> Result<TreeReport, Problem> {
    let mut reader = root.reader(path)?;
    let size = reader.entry().size;
    match io::copy(&mut reader, out) {
        Ok(bytes) => Ok(TreeReport { files: 1, bytes, ..Default::default() }),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Ok(TreeReport { files: 1, bytes: size, ..Default::default() })
        }
        Err(error) => Err(Problem::internal(format!("writing to stdout: {error}"))),
    }
}

/// A tree from one directory to another, through a pipe. Links that lead out are left out and told.
fn transfer(
    from: &Root,
    from_path: &GuestPath,
    to: &Root,
    to_path: &GuestPath,
) -> Result<TreeReport, Problem> {
    let (reader, writer) = io::pipe().map_err(Problem::internal)?;
    let limits = TreeLimits::default();
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || write_tar(from, from_path, writer, &limits));
        let received = read_tar(to, to_path, reader, &limits, OutsideLinks::LeaveOut);
        let sent = sending.join().map_err(|_| Problem::internal("packing the tree failed"))?;
        // When the receiver fails, the sender only sees that nobody reads any more.
        let mut report = received?;
        let sent = sent?;
        report.left_out_count += sent.left_out_count;
        report.left_out.extend(sent.left_out);
        Ok(report)
    })
}

fn tell(report: &TreeReport, to_stdout: bool, output: &Output) -> Result<(), Problem> {
    if output.json && !to_stdout {
        let left_out: Vec<_> =
            report.left_out.iter().map(|left| json!({ "path": left.path, "why": left.why })).collect();
        return output.object(&json!({
            "files": report.files,
            "directories": report.dirs,
            "links": report.links,
            "bytes": report.bytes,
            "left_out": left_out,
            "left_out_count": report.left_out_count,
        }));
    }
    for left in &report.left_out {
        output.warning(format_args!("left out {}: {}", left.path, left.why));
    }
    let unnamed = report.left_out_count.saturating_sub(report.left_out.len() as u64);
    if unnamed > 0 {
        output.warning(format_args!("left out {unnamed} more"));
    }
    let size = carrel_proto::limits::ByteSize(report.bytes);
    output.detail(format_args!(
        "{} files, {} directories, {} links, {size}",
        report.files, report.dirs, report.links
    ));
    Ok(())
}

fn host(path: &Path, error: io::Error) -> Problem {
    let code = match error.kind() {
        io::ErrorKind::NotFound => Code::NotFound,
        io::ErrorKind::PermissionDenied => Code::Permission,
        _ => Code::InvalidArgument,
    };
    Problem::new(code, format!("{}: {error}", path.display())).hint("check the path on this host")
}

/// `dir/.` means what is in it, as with `cp`.
fn ends_in_dot(path: &OsStr) -> bool {
    path == "." || path.as_bytes().ends_with(b"/.")
}

/// The last component; of `..` and `.` the real one.
fn base_name(path: &Path) -> Option<OsString> {
    path.file_name()
        .map(OsStr::to_owned)
        .or_else(|| std::fs::canonicalize(path).ok()?.file_name().map(OsStr::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        let side = |text: &str| Side::parse(OsStr::new(text)).unwrap();
        assert_eq!(side("-"), Side::Stream);
        assert_eq!(side("a/b"), Side::Host("a/b".into()));
        assert_eq!(side("./a:b"), Side::Host("./a:b".into()));
        assert_eq!(side("/x/a:b"), Side::Host("/x/a:b".into()));
        let Side::Sandbox { target, path } = side("work:a:b") else { panic!() };
        assert_eq!((target.name.as_str(), path.as_os_str()), ("work", OsStr::new("a:b")));
        let Side::Sandbox { path, .. } = side("work:") else { panic!() };
        assert_eq!(path, ".");
        assert!(Side::parse(OsStr::new("bad name:x")).is_err());
    }
}
