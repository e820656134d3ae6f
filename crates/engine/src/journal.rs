//! JSON lines in a file that never grows too large: `events.jsonl`, `audit.jsonl`.
//!
//! A thread writes; callers hand over and go on. Its queue is bounded: what comes when it is full is dropped, counted, and
//! the count is written down as a line of its own, so that a reader knows where something is missing.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use serde::Serialize;

use crate::{events::Numbered, registry::now_ms};

/// Lines that may wait for the disk: some seconds of a busy host.
const QUEUE: usize = 4096;
/// So long a line waits for more. Waking the thread for each costs a caller more than the line itself.
const GATHERING: Duration = Duration::from_millis(5);
/// Longest line; a longer one is replaced by a word that says so.
const MAX_LINE: usize = 64 << 10;

/// How large a journal gets: `most_files` of `most_bytes` each, the running one among them.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    pub most_bytes: u64,
    pub most_files: usize,
}

impl Default for Rotation {
    /// Some weeks of an ordinary host, in 50 MB.
    fn default() -> Self {
        Self { most_bytes: 10 << 20, most_files: 5 }
    }
}

enum Entry {
    Event(Numbered),
    Line(Vec<u8>),
    /// Answered when everything before it is in the file.
    Flush(SyncSender<()>),
}

/// A handle to the file's thread. Dropping it writes out what is waiting.
pub struct Journal {
    sender: Option<SyncSender<Entry>>,
    dropped: Arc<AtomicU64>,
    /// Of those, how many a line has told of.
    told: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
    path: PathBuf,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Journal {
    /// Opens the file, or makes it, for its owner alone.
    pub fn open(path: &Path, rotation: Rotation) -> io::Result<Self> {
        Self::with_queue(path, rotation, QUEUE)
    }

    fn with_queue(path: &Path, rotation: Rotation, queue: usize) -> io::Result<Self> {
        let dropped = Arc::new(AtomicU64::new(0));
        let writer = Writer::open(path.to_path_buf(), rotation)?;
        let told = Arc::clone(&writer.told);
        let (sender, receiver) = sync_channel(queue);
        let counter = Arc::clone(&dropped);
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run(&receiver, &counter))?;
        Ok(Self {
            sender: Some(sender),
            dropped,
            told,
            thread: Mutex::new(Some(thread)),
            path: path.to_path_buf(),
        })
    }

    fn hand_over(&self, entry: Entry) {
        let sent = self.sender.as_ref().is_some_and(|sender| sender.try_send(entry).is_ok());
        if !sent {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One line. Never waits.
    pub fn write(&self, line: &impl Serialize) {
        match serde_json::to_vec(line) {
            Ok(line) => self.hand_over(Entry::Line(line)),
            Err(_) => drop(self.dropped.fetch_add(1, Ordering::Relaxed)),
        }
    }

    pub(crate) fn event(&self, event: Numbered) {
        self.hand_over(Entry::Event(event));
    }

    /// Waits until what was handed over before is in the file. For the end of a process.
    pub fn flush(&self) {
        let (done, wait) = sync_channel(1);
        if self.sender.as_ref().is_some_and(|sender| sender.send(Entry::Flush(done)).is_ok()) {
            let _ = wait.recv();
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lines that were dropped since it was opened.
    pub fn lost(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed) + self.told.load(Ordering::Relaxed)
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.sender = None;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

struct Writer {
    path: PathBuf,
    rotation: Rotation,
    file: BufWriter<File>,
    bytes: u64,
    told: Arc<AtomicU64>,
}

fn open(path: &Path) -> io::Result<(BufWriter<File>, u64)> {
    let file = File::options().append(true).create(true).mode(0o600).open(path)?;
    // It may be there from before, with other rights.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    let bytes = file.metadata()?.len();
    Ok((BufWriter::new(file), bytes))
}

#[derive(Serialize)]
struct Dropped {
    unix_ms: u64,
    kind: &'static str,
    dropped: u64,
}

impl Writer {
    fn open(path: PathBuf, rotation: Rotation) -> io::Result<Self> {
        let (file, bytes) = open(&path)?;
        Ok(Self { path, rotation, file, bytes, told: Arc::default() })
    }

    fn run(mut self, receiver: &Receiver<Entry>, dropped: &AtomicU64) {
        loop {
            let entry = match receiver.try_recv() {
                Ok(entry) => entry,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    // Nothing waits: what was written becomes visible.
                    self.say_dropped(dropped);
                    let _ = self.file.flush();
                    match receiver.recv() {
                        Ok(entry @ Entry::Flush(_)) => entry,
                        // What follows in a moment is written with it, and wakes nobody.
                        Ok(entry) => {
                            std::thread::sleep(GATHERING);
                            entry
                        }
                        Err(_) => break,
                    }
                }
            };
            let line = match entry {
                Entry::Event(event) => serde_json::to_vec(&event).unwrap_or_default(),
                Entry::Line(line) => line,
                Entry::Flush(done) => {
                    self.say_dropped(dropped);
                    let _ = self.file.flush();
                    let _ = done.try_send(());
                    continue;
                }
            };
            self.say_dropped(dropped);
            // A full disk costs lines, and says so when there is room again.
            if line.len() > MAX_LINE || self.line(line).is_err() {
                dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.say_dropped(dropped);
        let _ = self.file.flush();
    }

    fn say_dropped(&mut self, dropped: &AtomicU64) {
        let count = dropped.swap(0, Ordering::Relaxed);
        if count == 0 {
            return;
        }
        let said = Dropped { unix_ms: now_ms(), kind: "journal.dropped", dropped: count };
        let written = serde_json::to_vec(&said).map_err(io::Error::other).and_then(|line| self.line(line));
        let counter = if written.is_ok() { &*self.told } else { dropped };
        counter.fetch_add(count, Ordering::Relaxed);
    }

    fn line(&mut self, mut line: Vec<u8>) -> io::Result<()> {
        line.push(b'\n');
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.rotation.most_bytes {
            self.rotate()?;
        }
        self.file.write_all(&line)?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// `x.jsonl` becomes `x.jsonl.1`, that one `x.jsonl.2`, and the last one goes.
    fn rotate(&mut self) -> io::Result<()> {
        self.file.flush()?;
        let numbered = |number: usize| {
            let mut name = self.path.clone().into_os_string();
            if number > 0 {
                name.push(format!(".{number}"));
            }
            PathBuf::from(name)
        };
        let oldest = self.rotation.most_files.saturating_sub(1);
        for number in (0..oldest).rev() {
            let _ = fs::rename(numbered(number), numbered(number + 1));
        }
        if oldest == 0 {
            fs::remove_file(&self.path)?;
        }
        (self.file, self.bytes) = open(&self.path)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        events::{Event, Hub, Kind},
        tenant::Tenant,
    };

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn lines_are_there_after_a_flush_and_for_the_owner_alone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("audit.jsonl");
        fs::write(&path, "{\"n\":0}\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let journal = Journal::open(&path, Rotation::default()).unwrap();
        for n in 1..100 {
            journal.write(&serde_json::json!({ "n": n }));
        }
        journal.flush();
        let numbers: Vec<_> = lines(&path).iter().map(|line| line["n"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..100).collect::<Vec<_>>());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        journal.write(&serde_json::json!({ "n": 100 }));
        drop(journal);
        assert_eq!(lines(&path).len(), 101);
    }

    #[test]
    fn files_are_rotated_by_size_and_their_number_is_bounded() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("events.jsonl");
        let journal = Journal::open(&path, Rotation { most_bytes: 1000, most_files: 3 }).unwrap();
        for n in 0..1000 {
            journal.write(&serde_json::json!({ "number": n }));
        }
        drop(journal);
        let mut names: Vec<_> =
            fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]);
        let mut all = Vec::new();
        for name in ["events.jsonl.2", "events.jsonl.1", "events.jsonl"] {
            let file = place.path().join(name);
            assert!(fs::metadata(&file).unwrap().len() <= 1000);
            all.extend(lines(&file).iter().map(|line| line["number"].as_u64().unwrap()));
        }
        assert_eq!(*all.last().unwrap(), 999);
        assert!(all.windows(2).all(|pair| pair[1] == pair[0] + 1));
    }

    #[test]
    fn what_is_too_much_is_counted_and_said() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("events.jsonl");
        let journal = Journal::with_queue(&path, Rotation::default(), 1).unwrap();
        const ALL: u64 = 20_000;
        for n in 0..ALL {
            journal.write(&serde_json::json!({ "number": n }));
        }
        journal.write(&"x".repeat(MAX_LINE + 1));
        journal.flush();
        let lost = journal.lost();
        drop(journal);
        let lines = lines(&path);
        let dropped: u64 = lines.iter().filter_map(|line| line["dropped"].as_u64()).sum();
        let written = lines.iter().filter(|line| line["number"].is_u64()).count() as u64;
        assert_eq!(dropped + written, ALL + 1);
        assert!(dropped >= 1 && dropped == lost);
    }

    #[test]
    fn the_hub_writes_its_events_down() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("events.jsonl");
        let hub = Hub::default();
        assert!(hub.keep(Journal::open(&path, Rotation::default()).unwrap()));
        hub.tell(Event::new(Kind::RunStarted, &Tenant::local()).detail("python"));
        hub.journal().unwrap().flush();
        let lines = lines(&path);
        assert_eq!((&lines[0]["kind"], &lines[0]["detail"]), (&"run.started".into(), &"python".into()));
        assert!(lines[0]["seq"].is_u64());
    }
}
