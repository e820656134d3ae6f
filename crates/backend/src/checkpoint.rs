//! Boxes on disk, by way of CRIU.
//!
//! ```text
//! IMAGE/manifest.json     what it is of, what it was made with, a checksum of every file (unless it is for forks alone)
//!       agent.json        what the agent knew
//!       tmp.tar …         file systems in memory, where there was something in them
//!       0/ 1/ …           the processes of each session
//! ```
//! One that stays for long is packed ([`crate::packed`]).
//!
//! A session is one tree of processes in a pid, mount and user namespace of its own, and these three are what CRIU writes
//! and makes anew; every mount in it is named, and comes from the new box. Network, IPC and host name belong to the box, which
//! is made anew like any other; the agent is not written, it writes down what it knows ([`carrel_proto::message::Request::Save`]).
//! What CRIU runs as, and where it stands, is in [`carrel_jail::visit`].
//!
//! Until the image is whole nothing of the box is ended; whoever dies on the way leaves processes that go on: the agent lets go
//! of what CRIU has stopped as soon as nobody holds the line to it on which it was told to prepare. CRIU holds it as well, so
//! that this comes after its work, also when whoever started it is killed. It is not killed with them: it has a process group
//! of its own, for whoever stops half-way leaves foreign code in the processes.

mod criu;
mod memory;
mod talk;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
};

use carrel_jail::{
    tree,
    userns::Ids,
    visit::{self, Way},
};
use carrel_proto::{
    id::ExecId,
    message::{Event, PROTOCOL, Request},
    problem::{Code, Problem},
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use self::criu::{common, last_error, memory, parse, refused, run};
pub(crate) use self::{
    criu::Criu,
    memory::{IN_MEMORY, inside, known_in, pack_all, unpack_all},
    talk::Talk,
};
use crate::{
    COMPLETE,
    link::lost,
    memfd_image, packed, pstree_image,
    steps::{Step, Watch},
    sums, userns_image,
};

/// Raised with every change of what is in an image.
const VERSION: u32 = 1;
/// Of one that is packed, so that a carrel that cannot unpack does not take its files for missing ones.
const VERSION_PACKED: u32 = 2;
const MANIFEST: &str = "manifest.json";
const AGENT: &str = "agent.json";

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    protocol: u32,
    criu: String,
    kernel: String,
    machine: String,
    /// The mounts of each session; they are named by their place in this list.
    sessions: Vec<Vec<Mounted>>,
    /// CRC-32 and length of every file, before it was packed.
    files: BTreeMap<String, packed::Sum>,
    /// Only its writer brings it back, at once: there are no sums.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    passed: bool,
}

impl Manifest {
    fn read(image: &Path) -> Result<Self, Problem> {
        let text = fs::read(image.join(MANIFEST)).map_err(|error| damaged(error.to_string()))?;
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        match manifest.files.keys().find(|name| !packed::is_plain(name)) {
            Some(name) => Err(damaged(format!("{name:?} is no name of a file of it"))),
            None => Ok(manifest),
        }
    }

    fn put(&self, image: &Path) -> Result<(), Problem> {
        let text = serde_json::to_vec(self).map_err(Problem::internal)?;
        fs::write(image.join(MANIFEST), text).map_err(failed("writing the image"))
    }
}

fn damaged(why: String) -> Problem {
    Problem::new(Code::StateLost, format!("the image of the sandbox is no good: {why}"))
        .hint("its files are kept; the next call starts new interpreters over them")
}

/// A mount of a session: where, and whether it can be written to.
#[derive(Debug, Serialize, Deserialize)]
struct Mounted {
    at: String,
    read_only: bool,
}

/// A box that is to be written.
#[derive(Debug)]
pub(crate) struct Living<'a> {
    pub(crate) socket: PathBuf,
    pub(crate) spool: PathBuf,
    /// The agent's program, and its pid on the host.
    pub(crate) program: PathBuf,
    pub(crate) agent: i32,
    pub(crate) watch: &'a Watch,
}

/// Writes a box to `image`, which is made. Its processes are stopped afterwards, to be ended; on error they go on.
pub(crate) fn write(criu: &Criu, living: &Living<'_>, image: &Path) -> Result<(), Problem> {
    // Gone with this function, and then the agent goes on, unless the box has been ended.
    let mut talk = Talk::open(&living.socket)?;
    let Event::Prepared { inits, sockets } = talk.ask(&Request::PrepareSleep)? else {
        return Err(lost("it answers something else"));
    };
    // Nobody else is heard from here on: whoever has come since the last question would lose its line with the box.
    if !matches!(talk.ask(&Request::Rest { idle_ms: None })?, Event::Rest(rest) if rest.calls == 0) {
        return Err(Problem::new(Code::Conflict, "somebody is calling the sandbox").hint("try again"));
    }
    let inits = on_host(living.agent, &inits)?;
    living.watch.reached(Step::AgentPrepared);
    let written = write_all(criu, living, image, &inits, &sockets, &mut talk, true)
        .and_then(|()| sync(image).map_err(failed("writing the image")));
    if written.is_ok() {
        living.watch.reached(Step::ImageComplete);
    }
    if written.is_err() {
        let _ = fs::remove_dir_all(image);
    }
    // The agent must not hear that its caller is gone before it is ended.
    if written.is_ok() {
        std::mem::forget(talk);
    }
    written
}

/// Writes a box to `image`, which is made, and does `meanwhile` before its processes go on. Of one that is not `kept` there
/// are no checksums.
pub(crate) fn copy(
    criu: &Criu,
    living: &Living<'_>,
    image: &Path,
    kept: bool,
    meanwhile: impl FnOnce() -> Result<(), Problem>,
) -> Result<(), Problem> {
    let mut talk = Talk::open(&living.socket)?;
    let Event::Prepared { inits, sockets } = talk.ask(&Request::PrepareSleep)? else {
        return Err(lost("it answers something else"));
    };
    let inits = on_host(living.agent, &inits)?;
    living.watch.reached(Step::AgentPrepared);
    let written =
        write_all(criu, living, image, &inits, &sockets, &mut talk, kept).and_then(|()| meanwhile());
    if written.is_err() {
        let _ = fs::remove_dir_all(image);
    }
    written
}

fn failed(what: &str) -> impl Fn(io::Error) -> Problem {
    let what = what.to_owned();
    move |error| {
        let word = format!("{what}: {error}");
        full(&word).unwrap_or_else(|| Problem::internal(word))
    }
}

/// That there is no room passes, and says nothing of the sandbox.
fn full(why: &str) -> Option<Problem> {
    let is_full = ["No space left", "Disk quota exceeded"].iter().any(|word| why.contains(word));
    is_full.then(|| {
        Problem::new(Code::Disk, format!("the host's disk is full: {why}"))
            .hint("make room on it and try again; nothing of the sandbox is lost")
    })
}

fn write_all(
    criu: &Criu,
    living: &Living<'_>,
    image: &Path,
    inits: &[i32],
    sockets: &[u64],
    talk: &mut Talk,
    kept: bool,
) -> Result<(), Problem> {
    fs::create_dir(image).map_err(failed("making the image's directory"))?;
    let mut sessions = Vec::new();
    for (number, init) in inits.iter().enumerate() {
        let directory = image.join(number.to_string());
        fs::create_dir(&directory).map_err(failed("making the image's directory"))?;
        let mounts = mounts_of(*init).map_err(failed("reading a session's mounts"))?;
        let mut arguments = common("dump", &directory);
        arguments.extend(["--tree".into(), init.to_string(), "--leave-stopped".into()]);
        // A file that is open and has no name any more is part of the image; bigger ones are refused.
        arguments.extend(["--ghost-limit".into(), "256M".into()]);
        for (number, mount) in mounts.iter().enumerate() {
            arguments.extend(["--external".into(), format!("mnt[{}]:m{number}", mount.at)]);
        }
        for socket in sockets {
            arguments.extend(["--external".into(), format!("unix[{socket}]")]);
        }
        let visit = visit::Visit {
            agent: living.agent,
            program: criu.program.clone(),
            arguments,
            way: Way::Write,
            memory: memory(),
        };
        let line = talk.stream.try_clone().map_err(failed("holding the line to the agent"))?;
        run(&living.program, &visit, Stdio::from(OwnedFd::from(line)))
            .map_err(|said| refused(&directory.join("dump.log"), &said))?;
        sessions.push(mounts);
        living.watch.reached(Step::SessionWritten);
    }
    talk.ask(&Request::Save)?;
    keep_state(living, image)?;
    living.watch.reached(Step::AgentSaved);
    pack_all(living, image)?;
    living.watch.reached(Step::MemoryPacked);
    let files = match kept {
        true => sums::of_tree(image, is_summed).map_err(failed("reading the image"))?,
        false => BTreeMap::new(),
    };
    let uname = rustix::system::uname();
    let manifest = Manifest {
        version: VERSION,
        protocol: PROTOCOL,
        criu: criu.version.clone(),
        kernel: uname.release().to_string_lossy().into_owned(),
        machine: uname.machine().to_string_lossy().into_owned(),
        sessions,
        files,
        passed: !kept,
    };
    manifest.put(image)?;
    living.watch.reached(Step::ManifestWritten);
    Ok(())
}

/// What the agent has written down becomes a part of the image.
fn keep_state(living: &Living<'_>, image: &Path) -> Result<(), Problem> {
    fs::rename(living.spool.join(AGENT), image.join(AGENT))
        .or_else(|_| {
            // Another file system.
            fs::copy(living.spool.join(AGENT), image.join(AGENT)).map(drop)
        })
        .map_err(failed("keeping the agent's state"))
}

pub(crate) fn is_packed(image: &Path) -> bool {
    image.join(format!("{AGENT}{}", packed::END)).exists()
}

/// Packs `image` into `target`, which is made, and puts it on the disk. An image that is damaged is not packed. `None`: it
/// was told to stop; what is there is for the caller to remove.
pub(crate) fn pack_image(
    image: &Path,
    target: &Path,
    go_on: &dyn Fn() -> bool,
) -> Result<Option<()>, Problem> {
    let failed = failed("packing an image");
    let manifest = Manifest::read(image)?;
    fs::create_dir(target).map_err(&failed)?;
    for (name, sum) in &manifest.files {
        match packed::pack_file(image, target, name, go_on).map_err(&failed)? {
            None => return Ok(None),
            Some(found) if found != *sum => return Err(not_what_was_written(name)),
            Some(_) => {}
        }
    }
    Manifest { version: VERSION_PACKED, ..manifest }.put(target)?;
    sync(target).map_err(&failed)?;
    Ok(Some(()))
}

fn not_what_was_written(name: &str) -> Problem {
    damaged(format!("{name} is not what was written"))
}

/// All of it at once, because an image is many files; and before anything says that it is there.
fn sync(image: &Path) -> io::Result<()> {
    let directory = File::open(image)?;
    rustix::fs::syncfs(&directory)?;
    File::create(image.join(COMPLETE))?.sync_all()?;
    directory.sync_all()
}

/// The box of `request`, whose new agent is `agent`, gets its processes back.
pub(crate) fn bring_back(
    criu: &Criu,
    living: &Living<'_>,
    image: &Image,
    cgroups: &[PathBuf],
    ids: &Ids,
    view: &Path,
) -> Result<(), Problem> {
    unpack_all(living, &image.directory)?;
    living.watch.reached(Step::MemoryUnpacked);
    let place = stand(&image.directory)?;
    let mut talk = Talk::open(&living.socket)?;
    let Event::Offered { files } = talk.ask(&Request::Offer)? else {
        return Err(lost("it answers something else"));
    };
    living.watch.reached(Step::EndsOffered);
    for (number, mounts) in image.manifest.sessions.iter().enumerate() {
        let directory = show(&image.directory.join(number.to_string()), view, ids)?;
        let mut arguments = common("restore", &directory);
        // The root, then the others in their order.
        let mut shown = vec![("/".to_owned(), true)];
        let at = |number: usize| place.join(number.to_string()).to_string_lossy().into_owned();
        arguments.extend(["--root".into(), at(0), "--restore-detached".into()]);
        for (number, mount) in mounts.iter().enumerate() {
            arguments.extend(["--external".into(), format!("mnt[m{number}]:{}", at(shown.len()))]);
            shown.push((source_of(&mount.at), mount.read_only));
        }
        let inside = visit::Inside {
            place: place.to_path_buf(),
            mounts: shown,
            cgroups: cgroups.to_vec(),
            files: files.clone(),
        };
        let program = criu.program.clone();
        let visit = visit::Visit {
            agent: living.agent,
            program,
            arguments,
            way: Way::BringBack(inside),
            memory: memory(),
        };
        run(&living.program, &visit, Stdio::null()).map_err(|said| {
            let why = last_error(&directory.join("restore.log")).unwrap_or(said);
            not_brought_back(&why)
        })?;
        living.watch.reached(Step::SessionBack);
    }
    talk.ask(&Request::Resumed)?;
    living.watch.reached(Step::BoxBack);
    Ok(())
}

fn not_brought_back(why: &str) -> Problem {
    let word = format!("bringing the processes back: {why}");
    if let Some(problem) = full(&word).or_else(|| replaced(why)) {
        return problem;
    }
    let kept = "its image and its files are kept: try again, or close it and go on with its files";
    Problem::internal(word).hint(kept)
}

/// A file that a process has open or mapped must be the one that it was: an interpreter may have been upgraded meanwhile.
fn replaced(why: &str) -> Option<Problem> {
    let file = why.strip_prefix("File ")?;
    let (file, _) = [" has bad size", " has bad mode", " has bad build-ID", " has bad checksum"]
        .iter()
        .find_map(|word| file.split_once(word))?;
    let word = format!(
        "the sandbox cannot be brought back: its processes use {file:?}, which is another one by now"
    );
    Some(Problem::new(Code::Unsupported, word).hint(
        "put the old one back; or give up what is in memory and keep its files (`carrel close NAME --keep-workspace DIR`)",
    ))
}

/// The image of a session as CRIU shall find it: one image may be brought back several times at once, each time as other users,
/// and what CRIU writes while it does so goes beside it.
fn show(session: &Path, view: &Path, ids: &Ids) -> Result<PathBuf, Problem> {
    let place = view.join(session.file_name().unwrap_or_default());
    let make = || -> io::Result<()> {
        fs::create_dir_all(&place)?;
        for entry in fs::read_dir(session)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_remark(&name) {
                continue;
            }
            let shown = place.join(&name);
            if userns_image::is_it(&name) {
                let bytes =
                    userns_image::with_ids(&fs::read(entry.path())?, ids).map_err(io::Error::other)?;
                fs::write(shown, bytes)?;
            } else if name == memfd_image::NAME {
                fs::write(shown, memfd_image::with_owners(fs::read(entry.path())?))?;
            } else if name == pstree_image::NAME {
                fs::write(shown, pstree_image::with_orphans_at_root(fs::read(entry.path())?))?;
            } else if fs::hard_link(entry.path(), &shown).is_err() {
                // Another file system. A symbolic link would not do: CRIU follows names when it stands in another root already.
                fs::copy(entry.path(), shown)?;
            }
        }
        Ok(())
    };
    make().map_err(failed("laying out the image"))?;
    Ok(place)
}

/// The manifest is what has the sums, and the mark comes after it.
fn is_summed(name: &str) -> bool {
    name != MANIFEST && name != COMPLETE && !is_remark(name)
}

/// What CRIU says of its own work.
fn is_remark(name: &str) -> bool {
    name.ends_with(".log") || name.starts_with("stats-")
}

/// Where mounts are shown to those who come back, in a view of mounts that nobody else has. Their user namespace must have a
/// way there, so it cannot be below the state directory; and what is there is covered, so nothing of ours may be.
fn stand(image: &Path) -> Result<PathBuf, Problem> {
    let usable = |place: &PathBuf| place.is_dir() && !image.starts_with(place);
    ["/mnt", "/media", "/srv", "/opt"].map(PathBuf::from).into_iter().find(usable).ok_or_else(|| {
        Problem::new(Code::Unsupported, "none of /mnt, /media, /srv and /opt can be used to show mounts")
            .hint("make an empty directory /mnt")
    })
}

/// What a masked part of a session's `/proc` is made of.
fn source_of(mount: &str) -> String {
    match mount.strip_prefix("/proc/") {
        Some(name) if carrel_jail::mounts::is_masked_directory(name) => carrel_jail::mounts::EMPTY.to_owned(),
        Some(_) => "/dev/null".to_owned(),
        None => mount.to_owned(),
    }
}

/// An image that can be used here, if it is whole.
#[derive(Debug)]
pub(crate) struct Image {
    directory: PathBuf,
    manifest: Manifest,
    /// It is: unpacking has shown that, or it was written a moment ago.
    checked: bool,
}

impl Image {
    /// Opens an image, unless it was made by another kind of host. One that is packed is unpacked to `scratch`. `at_once`: whoever
    /// opens it has written it, or copied what was kept, a moment ago.
    pub(crate) fn open(
        directory: &Path,
        criu: &Criu,
        scratch: &Path,
        at_once: bool,
    ) -> Result<Self, Problem> {
        let manifest = Manifest::read(directory)?;
        if manifest.passed && !at_once {
            return Err(damaged("it was not written to be kept".into()));
        }
        let known = [VERSION, VERSION_PACKED].contains(&manifest.version);
        if !known || manifest.protocol != PROTOCOL {
            return Err(damaged("it was made by another version of carrel".into()));
        }
        let uname = rustix::system::uname();
        let machine = uname.machine().to_string_lossy();
        if manifest.machine != machine {
            return Err(damaged(format!("it was made on {}, this is {machine}", manifest.machine)));
        }
        if parse(&manifest.criu) > parse(&criu.version) {
            let word = format!("the sandbox was written by CRIU {}, here is {}", manifest.criu, criu.version);
            return Err(Problem::new(Code::Unsupported, word).hint("install that version or a newer one"));
        }
        if manifest.version == VERSION_PACKED {
            unpack_image(directory, scratch, &manifest)?;
            return Ok(Self { directory: scratch.to_path_buf(), manifest, checked: true });
        }
        let checked = manifest.passed;
        Ok(Self { directory: directory.to_path_buf(), manifest, checked })
    }

    /// Whether every file is what was written. Before anything of it runs.
    pub(crate) fn check(&self) -> Result<(), Problem> {
        if self.checked {
            return Ok(());
        }
        let found = sums::of_tree(&self.directory, is_summed).map_err(|error| {
            match Errno::from_io_error(&error) {
                // These say nothing of the image.
                Some(Errno::NOMEM | Errno::AGAIN | Errno::INTR | Errno::MFILE | Errno::NFILE) => {
                    failed("reading the image")(error)
                }
                _ => damaged(error.to_string()),
            }
        })?;
        if let Some(name) = found.keys().find(|name| !self.manifest.files.contains_key(*name)) {
            return Err(damaged(format!("{name} was not written with it")));
        }
        for (name, sum) in &self.manifest.files {
            match found.get(name) {
                None => return Err(damaged(format!("{name} is missing"))),
                Some(found) if found != sum => return Err(not_what_was_written(name)),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Puts the agent's state where the new agent finds it; see [`life_in`].
    pub(crate) fn give_state(&self, spool: &Path) -> Result<u32, Problem> {
        let give = || -> io::Result<u32> {
            let text = fs::read(self.directory.join(AGENT))?;
            fs::write(spool.join(AGENT), &text)?;
            life_in(&text)
        };
        give().map_err(failed("giving the agent its state"))
    }
}

/// How often the sandbox had been brought back whose agent has told its state: the new one goes on with its execs, whose numbers say
/// so.
pub(crate) fn life_in(state: &[u8]) -> io::Result<u32> {
    #[derive(Deserialize)]
    struct State {
        next_exec: u64,
    }
    let state: State = serde_json::from_slice(state)?;
    Ok(ExecId::life_of(state.next_exec))
}

fn unpack_image(image: &Path, target: &Path, manifest: &Manifest) -> Result<(), Problem> {
    fs::create_dir_all(target).map_err(failed("unpacking an image"))?;
    for (name, sum) in &manifest.files {
        match packed::unpack_file(image, target, name, sum.1) {
            Ok(found) if found == *sum => {}
            Ok(_) => return Err(not_what_was_written(name)),
            Err(error) => {
                // That the disk is full says nothing of the image.
                let word = format!("{name}: {error}");
                return Err(full(&word).unwrap_or_else(|| damaged(word)));
            }
        }
    }
    Ok(())
}

/// Every mount of a session but its root and its own `/proc`.
fn mounts_of(init: i32) -> io::Result<Vec<Mounted>> {
    let text = fs::read_to_string(format!("/proc/{init}/mountinfo"))?;
    let mount = |line: &str| {
        let mut fields = line.split(' ').skip(4);
        let (at, flags) = (fields.next()?.to_owned(), fields.next()?);
        Some(Mounted { at, read_only: flags.split(',').any(|flag| flag == "ro") })
    };
    Ok(text.lines().filter_map(mount).filter(|mount| mount.at != "/" && mount.at != "/proc").collect())
}

/// Pids that the agent told, in its own view, as the host sees them.
fn on_host(agent: i32, pids: &[i32]) -> Result<Vec<i32>, Problem> {
    let children = tree::children(agent);
    pids.iter()
        .map(|wanted| {
            // The host's, the box's, the session's.
            let found = children.iter().find(|pid| tree::pids(**pid).get(1) == Some(wanted));
            found.copied().ok_or_else(|| lost("a session of it is gone"))
        })
        .collect()
}
