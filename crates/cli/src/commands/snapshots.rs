//! `carrel snapshot`, `restore`, `fork`, `adopt`, `diff` and `snapshots`.

mod portable;

use std::{collections::BTreeSet, process::ExitCode};

use carrel_engine::{
    Found, Record, Snapshot,
    snapshots::{Changes, RestoreWish, SnapshotWish},
};
use carrel_proto::{
    id::{Key, SnapshotId},
    limits::ByteSize,
    problem::{Code, Problem},
};
use serde_json::{Value, json};

use crate::{
    args::{DiffArgs, ForkArgs, Named, RestoreArgs, SnapshotArgs, SnapshotsArgs, SnapshotsCommand},
    commands::ls::{self, now_ms},
    context::Context,
    output::short_time,
    progress::Progress,
    target::{self, Target},
};

pub(crate) async fn take(args: &SnapshotArgs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.known(&args.name).await?;
    let wish =
        SnapshotWish { tags: args.tags.clone(), files_only: args.files_only, ..SnapshotWish::default() };
    let progress = Progress::start(context.output, "saving the sandbox");
    let snapshot = context.desk.snapshot(&record, &wish).await?;
    drop(progress);
    if context.output.json {
        context.output.object(&object(&snapshot))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(reason) = snapshot.content.reason.as_ref().filter(|_| !args.files_only) {
        context.output.note(format_args!("only files were saved: {reason}"));
    }
    context.output.line(&snapshot.id)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn restore(args: &RestoreArgs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if args.name.as_ref().is_some_and(Target::is_id) {
        return Err(Problem::new(Code::InvalidArgument, "a new sandbox gets an id of its own")
            .hint("--as takes a name; without it the snapshot is restored in place"));
    }
    let key = args.name.as_ref().map(|name| name.key.clone());
    let wish = RestoreWish { key, files_only: args.files_only, ..RestoreWish::default() };
    let progress = Progress::start(context.output, "restoring the sandbox");
    let found = context.desk.restore(&args.snapshot, args.name.is_some(), &wish).await?;
    drop(progress);
    tell(&found, context)
}

pub(crate) async fn adopt(args: &Named, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.desk.adopt(&context.known(&args.name).await?).await?;
    tell(&Found { record, created: false, note: None }, context)
}

fn tell(found: &Found, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = &found.record;
    let note = found.note.map(|note| note.text(&ls::name(record)));
    if context.output.json {
        let mut object = ls::object(record);
        object["note"] = json!(note);
        context.output.object(&object)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(note) = note {
        context.output.note(note);
    }
    context.output.line(format_args!("{} {}", ls::name(record), record.id))?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn fork(args: &ForkArgs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.known(&args.name).await?;
    let progress = Progress::start(context.output, "forking the sandbox");
    let forked = context.desk.fork(&record, args.count).await?;
    drop(progress);
    if context.output.json {
        let fork = |fork: &carrel_engine::snapshots::Fork| {
            let mut object = ls::object(&fork.record);
            object["cost"] = json!({
                "duration_ms": fork.duration_ms,
                "disk_bytes": fork.disk_bytes,
                "memory_bytes": fork.memory_bytes,
            });
            object
        };
        let forks: Vec<Value> = forked.forks.iter().map(fork).collect();
        context.output.object(&json!({
            "forks": forks,
            "copy_ms": forked.copy_ms,
            "memory": forked.memory,
            "reason": forked.reason,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(reason) = &forked.reason {
        context.output.note(format_args!("forks have only the files: {reason}"));
    }
    for fork in &forked.forks {
        let name = fork.record.key.as_ref().map_or(fork.record.id.as_str(), target::shown);
        context.output.line(name)?;
        let (disk, memory) = (ByteSize(fork.disk_bytes), ByteSize(fork.memory_bytes));
        context
            .output
            .detail(format_args!("{name}: {} ms, {disk} on disk, {memory} in memory", fork.duration_ms));
    }
    context.output.detail(format_args!("the sandbox stood still for {} ms", forked.copy_ms));
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn diff(args: &DiffArgs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let side = |text: &String| -> (String, Option<Key>) {
        (text.clone(), text.parse::<Target>().ok().map(|target| target.key))
    };
    let diff = context.desk.diff(side(&args.from), args.to.as_ref().map(side)).await?;
    if context.output.json {
        context.output.object(&diff)?;
        return Ok(ExitCode::SUCCESS);
    }
    for (sign, changes) in [("A", &diff.added), ("M", &diff.changed), ("D", &diff.removed)] {
        list(sign, changes, context)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn list(sign: &str, changes: &Changes, context: &Context<'_>) -> Result<(), Problem> {
    for change in &changes.files {
        // A name must not play tricks on a terminal.
        let path: String = change.path.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        context.output.line(format_args!("{sign} {path}"))?;
    }
    let left = changes.count.saturating_sub(changes.files.len() as u64);
    if left > 0 {
        context.output.note(format_args!("{left} more of {sign} are not shown"));
    }
    Ok(())
}

pub(crate) async fn run(args: &SnapshotsArgs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    match &args.command {
        None => {}
        Some(SnapshotsCommand::Rm { snapshots }) => {
            for name in snapshots {
                context.desk.delete_snapshot(name).await?;
            }
            if context.output.json {
                context.output.object(&json!({ "removed": snapshots }))?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        Some(SnapshotsCommand::Export { snapshot, file }) => {
            return portable::export(snapshot, file, context).await;
        }
        Some(SnapshotsCommand::Import { file, trust_memory }) => {
            return portable::import(file, *trust_memory, context).await;
        }
    }
    let snapshots = context.desk.snapshots().await?;
    if args.tree {
        let records = context.desk.list().await?;
        return tree(&snapshots, &records, context);
    }
    if context.output.json {
        let all: Vec<Value> = snapshots.iter().map(object).collect();
        context.output.object(&json!({ "snapshots": all }))?;
        return Ok(ExitCode::SUCCESS);
    }
    if snapshots.is_empty() && context.output.aligned {
        context.output.note("there are no snapshots");
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = snapshots
        .iter()
        .map(|snapshot| {
            vec![
                snapshot.id.to_string(),
                of(snapshot),
                if snapshot.tags.is_empty() { "-".to_owned() } else { snapshot.tags.join(",") },
                what(snapshot).to_owned(),
                ByteSize(snapshot.bytes).to_string(),
                short_time(now_ms().saturating_sub(snapshot.made_unix_ms)),
            ]
        })
        .collect();
    context.output.table(&["ID", "SANDBOX", "TAGS", "HOLDS", "SIZE", "AGE"], &rows)?;
    Ok(ExitCode::SUCCESS)
}

/// What it is of, as the user would type it.
fn of(snapshot: &Snapshot) -> String {
    snapshot.key.as_ref().map_or(snapshot.sandbox.as_str(), target::shown).to_owned()
}

fn what(snapshot: &Snapshot) -> &'static str {
    if snapshot.content.memory { "memory" } else { "files" }
}

/// A snapshot in JSON.
fn object(snapshot: &Snapshot) -> Value {
    json!({
        "id": snapshot.id,
        "sandbox": snapshot.sandbox,
        "name": snapshot.key.as_ref().map(target::shown),
        "key": snapshot.key,
        "parent": snapshot.parent,
        "tags": snapshot.tags,
        "made_unix_ms": snapshot.made_unix_ms,
        "bytes": snapshot.bytes,
        "memory": snapshot.content.memory,
        "reason": snapshot.content.reason,
        "environment": snapshot.content.spec.environment,
    })
}

/// Everything that hangs on one snapshot; `None`: on none that is still there.
struct Tree<'a> {
    snapshots: &'a [Snapshot],
    records: &'a [Record],
    known: BTreeSet<&'a SnapshotId>,
}

impl<'a> Tree<'a> {
    fn below(&self, parent: Option<&SnapshotId>) -> impl Iterator<Item = &'a Snapshot> {
        let found = |snapshot: &&Snapshot| {
            snapshot.parent.as_ref().filter(|parent| self.known.contains(parent)) == parent
        };
        self.snapshots.iter().filter(found).collect::<Vec<_>>().into_iter()
    }

    fn sandboxes(&self, of: &SnapshotId) -> impl Iterator<Item = &'a Record> {
        self.records
            .iter()
            .filter(|record| record.origin.as_ref() == Some(of))
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn json(&self, snapshot: &Snapshot) -> Value {
        let mut value = object(snapshot);
        value["children"] = self.below(Some(&snapshot.id)).map(|child| self.json(child)).collect();
        value["sandboxes"] = self.sandboxes(&snapshot.id).map(ls::object).collect();
        value
    }

    fn lines(&self, snapshot: &Snapshot, indent: &str, lines: &mut Vec<String>) {
        let mut branches: Vec<Branch<'_>> = self.below(Some(&snapshot.id)).map(Branch::Snapshot).collect();
        branches.extend(self.sandboxes(&snapshot.id).map(Branch::Sandbox));
        let count = branches.len();
        for (at, branch) in branches.into_iter().enumerate() {
            let (knot, rest) = if at + 1 == count { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            match branch {
                Branch::Snapshot(child) => {
                    lines.push(format!("{indent}{knot}{}", title(child)));
                    self.lines(child, &format!("{indent}{rest}"), lines);
                }
                Branch::Sandbox(record) => lines.push(format!(
                    "{indent}{knot}{} {} ({})",
                    ls::name(record),
                    record.id,
                    ls::state(record)
                )),
            }
        }
    }
}

enum Branch<'a> {
    Snapshot(&'a Snapshot),
    Sandbox(&'a Record),
}

fn title(snapshot: &Snapshot) -> String {
    let tags: String = snapshot.tags.iter().map(|tag| format!(" #{tag}")).collect();
    let age = short_time(now_ms().saturating_sub(snapshot.made_unix_ms));
    format!(
        "{} {}{tags} ({}, {}, {age})",
        snapshot.id,
        of(snapshot),
        what(snapshot),
        ByteSize(snapshot.bytes)
    )
}

fn tree(snapshots: &[Snapshot], records: &[Record], context: &Context<'_>) -> Result<ExitCode, Problem> {
    let known = snapshots.iter().map(|snapshot| &snapshot.id).collect();
    let tree = Tree { snapshots, records, known };
    if context.output.json {
        let roots: Vec<Value> = tree.below(None).map(|root| tree.json(root)).collect();
        context.output.object(&json!({ "tree": roots }))?;
        return Ok(ExitCode::SUCCESS);
    }
    for root in tree.below(None) {
        context.output.line(title(root))?;
        let mut lines = Vec::new();
        tree.lines(root, "", &mut lines);
        for line in lines {
            context.output.line(line)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
