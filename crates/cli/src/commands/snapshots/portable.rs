//! `carrel snapshots export` and `import`.
//!
//! Done by this process, with this user's rights and view of the host, also where a daemon runs: they meet in the registry.

use std::{
    fs::{self, File},
    io::{self, IsTerminal, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use carrel_engine::{
    Tenant,
    snapshots::{Exported, ImportWish},
};
use carrel_proto::{
    limits::ByteSize,
    problem::{Code, Problem},
};
use serde_json::json;

use super::object;
use crate::{context::Context, progress::Progress};

const STANDARD: &str = "-";

fn failed(path: &Path, error: &io::Error) -> Problem {
    let code = match error.kind() {
        io::ErrorKind::NotFound => Code::NotFound,
        io::ErrorKind::PermissionDenied => Code::Permission,
        io::ErrorKind::StorageFull => Code::Disk,
        _ => Code::Internal,
    };
    Problem::new(code, format!("{}: {error}", path.display()))
}

/// A file that is there as a whole or not at all.
struct Draft {
    path: PathBuf,
    file: Option<File>,
}

impl Draft {
    fn beside(target: &Path) -> io::Result<Self> {
        let mut name = target.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let path = target.with_file_name(name);
        // What it holds is as private as the sandbox.
        let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        Ok(Self { path, file: Some(file) })
    }

    fn settle(mut self, target: &Path) -> io::Result<()> {
        if let Some(file) = self.file.take() {
            file.sync_all()?;
        }
        fs::rename(&self.path, target)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already, if it has its name.
        let _ = fs::remove_file(&self.path);
    }
}

pub(super) async fn export(name: &str, file: &Path, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if file == Path::new(STANDARD) && io::stdout().is_terminal() {
        return Err(Problem::new(Code::InvalidArgument, "a snapshot file is nothing for a terminal")
            .hint("name a file, or pass it on: `carrel snapshots export NAME - | …`"));
    }
    let engine = context.desk.own()?;
    let snapshot = engine.snapshot_of(&Tenant::local(), name)?;
    let id = snapshot.id.clone();
    let progress = Progress::start(context.output, "exporting the snapshot");
    let target = file.to_path_buf();
    let exported = tokio::task::spawn_blocking(move || -> Result<Exported, Problem> {
        if target == Path::new(STANDARD) {
            return engine.export_snapshot(&snapshot, io::stdout().lock());
        }
        let draft = Draft::beside(&target).map_err(|error| failed(&target, &error))?;
        let exported = match &draft.file {
            Some(out) => engine.export_snapshot(&snapshot, io::BufWriter::new(out))?,
            None => Exported::default(),
        };
        draft.settle(&target).map_err(|error| failed(&target, &error))?;
        Ok(exported)
    });
    let exported = exported.await.map_err(Problem::internal)??;
    drop(progress);
    if let Some(reason) = &exported.reason {
        context.output.note(format_args!("only files were exported: {reason}"));
    }
    if exported.left_out > 0 {
        context.output.note(format_args!("{} sockets, fifos or devices were left out", exported.left_out));
    }
    if file == Path::new(STANDARD) {
        return Ok(ExitCode::SUCCESS);
    }
    let size = fs::metadata(file).map_or(0, |meta| meta.len());
    if context.output.json {
        context.output.object(&json!({
            "snapshot": id,
            "file": file,
            "file_bytes": size,
            "bytes": exported.bytes,
            "memory": exported.memory,
            "reason": exported.reason,
            "left_out": exported.left_out,
        }))?;
    } else {
        context.output.line(format_args!("{} ({})", file.display(), ByteSize(size)))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn import(
    file: &Path,
    trust_memory: bool,
    context: &Context<'_>,
) -> Result<ExitCode, Problem> {
    let engine = context.desk.own()?;
    let progress = Progress::start(context.output, "importing the snapshot");
    let source = file.to_path_buf();
    let imported = tokio::task::spawn_blocking(move || {
        let wish = ImportWish { trust_memory, ..ImportWish::default() };
        let input: Box<dyn Read> = match source == Path::new(STANDARD) {
            true => Box::new(io::stdin().lock()),
            false => Box::new(File::open(&source).map_err(|error| failed(&source, &error))?),
        };
        engine.import_snapshot(input, &wish)
    });
    let snapshot = imported.await.map_err(Problem::internal)??;
    drop(progress);
    if context.output.json {
        context.output.object(&object(&snapshot))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(reason) = &snapshot.content.reason {
        context.output.note(format_args!("it has only files: {reason}"));
    }
    context.output.line(&snapshot.id)?;
    Ok(ExitCode::SUCCESS)
}
