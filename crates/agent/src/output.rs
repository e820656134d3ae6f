//! What one run or exec printed: numbered chunks with offsets, the newest in memory, the rest in the spool.
//!
//! ```text
//! |<- head: in the spool, all streams ->|   dropped, counted by the offsets   |<- tail of each stream: in memory ->|
//! ```
//! Head and tails together never pass the output limit. Each stream has a tail of its own, so that a flood on one does
//! not push out what another said last. Whether a chunk is head or tail is decided when it comes: one across the border
//! becomes two. At the end the tails are written behind the head. A call that printed next to nothing has no file at all.

use std::{collections::VecDeque, io, path::PathBuf};

use carrel_proto::{files::Content, frame::Stream};
use serde::{Deserialize, Serialize};

use crate::spool::Spool;

/// What is kept in memory when all of it is in the spool too: nothing is read back for a caller that keeps up. And the
/// most that the tail of standard output or error has.
const TAIL: usize = 64 << 10;
/// The most that shown values have of the tail: a picture or two, as they are kept whole or not at all.
const DISPLAY_TAIL: usize = 1 << 20;

/// What was said in a few words stays in memory: a file takes longer than the call, and its inode as much room. Some
/// file systems also look at all inodes that were freed in the last seconds before they give one out.
const FEW_WORDS: usize = 512;
const FEW_CHUNKS: usize = 8;

/// Standard output (or terminal), standard error, displays.
const SLOTS: usize = 3;
const DISPLAYS: usize = 2;

#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub(crate) number: u64,
    pub(crate) stream: Stream,
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Output {
    path: PathBuf,
    spool: Option<Spool>,
    /// In memory, by slot.
    recent: [VecDeque<Chunk>; SLOTS],
    recent_bytes: usize,
    next: u64,
    /// Bytes that came, by slot.
    totals: [u64; SLOTS],
    /// So much of the limit is left for the head.
    head_left: u64,
    /// The first chunk that is not of the head.
    head_end: Option<u64>,
    /// Bytes behind the head in memory, by slot, and how many of them may stay.
    tails: [usize; SLOTS],
    shares: [usize; SLOTS],
    dropped: u64,
}

/// As it is written down.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedOutput {
    spooled: bool,
    /// Number, stream, offset and bytes of what is in memory alone.
    recent: Vec<(u64, u8, u64, Content)>,
    next: u64,
    totals: [u64; SLOTS],
    head_left: u64,
    head_end: Option<u64>,
    dropped: u64,
}

fn slot(stream: Stream) -> usize {
    match stream {
        Stream::Stdin | Stream::Stdout | Stream::Pty => 0,
        Stream::Stderr => 1,
        Stream::Display => DISPLAYS,
    }
}

/// Parts of a limit: small limits are shared out in proportion.
fn shares(limit: u64) -> [usize; SLOTS] {
    let part = |parts: u64, most: usize| usize::try_from(limit / parts).unwrap_or(most).min(most);
    [part(8, TAIL), part(8, TAIL), part(4, DISPLAY_TAIL)]
}

impl Output {
    pub(crate) fn new(path: PathBuf, limit: u64) -> Self {
        let shares = shares(limit);
        let reserved: usize = shares.iter().sum();
        Self {
            path,
            spool: None,
            recent: Default::default(),
            recent_bytes: 0,
            next: 0,
            totals: [0; SLOTS],
            head_left: limit.saturating_sub(reserved as u64),
            head_end: None,
            tails: [0; SLOTS],
            shares,
            dropped: 0,
        }
    }

    /// What is in memory alone, and how to go on; see [`crate::sleep`].
    pub(crate) fn saved(&mut self) -> io::Result<SavedOutput> {
        if !self.is_short() {
            self.write_out(false)?;
        }
        let spooled = self.spool.as_ref().map_or(0, Spool::next);
        let mut recent: Vec<&Chunk> =
            self.recent.iter().flatten().filter(|chunk| chunk.number >= spooled).collect();
        recent.sort_by_key(|chunk| chunk.number);
        let recent = recent
            .into_iter()
            .map(|chunk| (chunk.number, chunk.stream.code(), chunk.offset, Content(chunk.bytes.clone())))
            .collect();
        Ok(SavedOutput {
            spooled: self.spool.is_some(),
            recent,
            next: self.next,
            totals: self.totals,
            head_left: self.head_left,
            head_end: self.head_end,
            dropped: self.dropped,
        })
    }

    pub(crate) fn load(path: PathBuf, limit: u64, saved: SavedOutput) -> io::Result<Self> {
        let mut output = Self {
            next: saved.next,
            totals: saved.totals,
            head_left: saved.head_left,
            head_end: saved.head_end,
            dropped: saved.dropped,
            spool: if saved.spooled { Some(Spool::open(&path)?) } else { None },
            ..Self::new(path, limit)
        };
        for (number, stream, offset, bytes) in saved.recent {
            let stream = Stream::from_code(stream).ok_or(io::ErrorKind::InvalidData)?;
            let slot = slot(stream);
            output.recent_bytes += bytes.0.len();
            if saved.head_end.is_some_and(|end| number >= end) {
                output.tails[slot] += bytes.0.len();
            }
            output.recent[slot].push_back(Chunk { number, stream, offset, bytes: bytes.0 });
        }
        Ok(output)
    }

    /// Number of the chunk that comes next.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn total(&self, stream: Stream) -> u64 {
        self.totals[slot(stream)]
    }

    /// Bytes that are not kept, once every caller has got what it waits for.
    pub(crate) fn dropped(&self) -> u64 {
        let excess = |slot: usize| {
            let over = self.tails[slot].saturating_sub(self.shares[slot]);
            if slot != DISPLAYS || over == 0 {
                return over;
            }
            let mut gone = 0;
            let head = self.head_end.unwrap_or(0);
            for chunk in self.recent[slot].iter().filter(|chunk| chunk.number >= head) {
                if gone >= over {
                    break;
                }
                gone += chunk.bytes.len();
            }
            gone
        };
        self.dropped + (0..SLOTS).map(excess).sum::<usize>() as u64
    }

    pub(crate) fn push(&mut self, stream: Stream, mut bytes: Vec<u8>) {
        let room = usize::try_from(self.head_left).unwrap_or(usize::MAX);
        if self.head_end.is_none() && bytes.len() > room {
            // A value is not cut: half of one cannot be shown.
            if room > 0 && stream != Stream::Display {
                let rest = bytes.split_off(room);
                self.add(stream, std::mem::replace(&mut bytes, rest));
            }
            self.head_end = Some(self.next);
        }
        self.add(stream, bytes);
    }

    fn add(&mut self, stream: Stream, bytes: Vec<u8>) {
        let slot = slot(stream);
        let offset = self.totals[slot];
        self.totals[slot] += bytes.len() as u64;
        self.recent_bytes += bytes.len();
        match self.head_end {
            Some(_) => self.tails[slot] += bytes.len(),
            None => self.head_left -= bytes.len() as u64,
        }
        self.recent[slot].push_back(Chunk { number: self.next, stream, offset, bytes });
        self.next += 1;
    }

    /// The chunk `number`, or the first kept one after it.
    pub(crate) fn get(&self, number: u64) -> io::Result<Option<Chunk>> {
        let after = |chunks: &VecDeque<Chunk>| chunks.partition_point(|chunk| chunk.number < number);
        let in_memory = self
            .recent
            .iter()
            .filter_map(|chunks| chunks.get(after(chunks)))
            .min_by_key(|chunk| chunk.number);
        if let Some(spool) = &self.spool
            && number < spool.next()
            && in_memory.is_none_or(|chunk| chunk.number > number)
            && let Some(chunk) = spool.read(number)?
        {
            return Ok(Some(chunk));
        }
        Ok(in_memory.cloned())
    }

    /// Bytes from chunk `number` on that are in memory: how far a follower is behind.
    pub(crate) fn behind(&self, number: u64) -> usize {
        self.recent
            .iter()
            .flat_map(|chunks| chunks.iter().rev().take_while(|chunk| chunk.number >= number))
            .map(|chunk| chunk.bytes.len())
            .sum()
    }

    /// Moves the head to the spool and lets memory go, but not what a caller at `wanted` has still to get and would
    /// find nowhere else.
    pub(crate) fn settle(&mut self, wanted: Option<u64>) -> io::Result<()> {
        if self.is_short() {
            return Ok(());
        }
        self.write_out(false)?;
        let spooled = self.spool.as_ref().map_or(0, Spool::next);
        while (self.recent_bytes > TAIL || self.head_end.is_some())
            && let Some(slot) = self.oldest().filter(|slot| self.recent[*slot][0].number < spooled)
            && let Some(chunk) = self.recent[slot].pop_front()
        {
            self.recent_bytes -= chunk.bytes.len();
        }
        for slot in 0..SLOTS {
            self.trim(slot, wanted);
        }
        Ok(())
    }

    /// The slot whose first chunk is the oldest of all.
    fn oldest(&self) -> Option<usize> {
        (0..SLOTS)
            .filter_map(|slot| Some((self.recent[slot].front()?.number, slot)))
            .min()
            .map(|(_, slot)| slot)
    }

    /// Cuts a stream's tail to its share, from the front.
    fn trim(&mut self, slot: usize, wanted: Option<u64>) {
        while let Some(excess) = self.tails[slot].checked_sub(self.shares[slot]).filter(|excess| *excess > 0)
            && let Some(first) = self.recent[slot].front_mut()
            && wanted.is_none_or(|wanted| first.number < wanted)
        {
            let gone = if slot == DISPLAYS { first.bytes.len() } else { excess.min(first.bytes.len()) };
            if gone == first.bytes.len() {
                self.recent[slot].pop_front();
            } else {
                first.bytes.drain(..gone);
                first.offset += gone as u64;
            }
            self.tails[slot] -= gone;
            self.recent_bytes -= gone;
            self.dropped += gone as u64;
        }
    }

    /// Whether a tail would have to be cut now to be closed, and a caller at `wanted` still has to get it.
    pub(crate) fn is_awaited(&self, wanted: Option<u64>) -> bool {
        wanted.is_some_and(|wanted| {
            (0..SLOTS).any(|slot| {
                self.tails[slot] > self.shares[slot]
                    && self.recent[slot].back().is_some_and(|last| last.number >= wanted)
            })
        })
    }

    /// Whether more would push out some of what is kept.
    pub(crate) fn is_full(&self) -> bool {
        self.head_end.is_some()
    }

    /// Whether it is all in memory, and not worth a file.
    fn is_short(&self) -> bool {
        let chunks: usize = self.recent.iter().map(VecDeque::len).sum();
        let few = self.recent_bytes <= FEW_WORDS && chunks <= FEW_CHUNKS;
        few && self.spool.is_none() && self.head_end.is_none()
    }

    /// Nothing more comes: the tails go to disk, memory to the agent.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        if self.is_short() {
            self.recent.iter_mut().for_each(VecDeque::shrink_to_fit);
            return Ok(());
        }
        self.settle(None)?;
        self.write_out(true)?;
        if let Some(spool) = &mut self.spool {
            spool.close();
            self.recent = Default::default();
            self.recent_bytes = 0;
            self.tails = [0; SLOTS];
        }
        Ok(())
    }

    /// Appends what is in memory alone, in order: of the head, or all of it.
    fn write_out(&mut self, whole: bool) -> io::Result<()> {
        let mut next = self.spool.as_ref().map_or(0, Spool::next);
        loop {
            let chunk = self
                .recent
                .iter()
                .filter_map(|chunks| chunks.get(chunks.partition_point(|chunk| chunk.number < next)))
                .min_by_key(|chunk| chunk.number);
            let Some(chunk) = chunk else { return Ok(()) };
            if !whole && self.head_end.is_some_and(|end| chunk.number >= end) {
                return Ok(());
            }
            let spool = match &mut self.spool {
                Some(spool) => spool,
                none => none.insert(Spool::create(&self.path)?),
            };
            spool.append(chunk)?;
            next = spool.next();
        }
    }

    /// Removes what is on disk.
    pub(crate) fn discard(&self) {
        if self.spool.is_some() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(output: &Output, from: u64) -> Vec<(u64, u64, String)> {
        let mut all = Vec::new();
        let mut next = from;
        while let Some(chunk) = output.get(next).unwrap() {
            next = chunk.number + 1;
            all.push((chunk.number, chunk.offset, String::from_utf8(chunk.bytes).unwrap()));
        }
        all
    }

    fn fresh(limit: u64, name: &str) -> Output {
        let path = std::env::temp_dir().join(format!("carrel-output-{}-{name}", std::process::id()));
        Output::new(path, limit)
    }

    #[test]
    fn chunks_are_found_from_any_number_before_and_after_closing() {
        let mut output = fresh(1 << 20, "any");
        for i in 0..1000 {
            output.push(Stream::Stdout, format!("line {i}\n").into_bytes());
            output.settle(None).unwrap();
        }
        assert_eq!(text(&output, 0).len(), 1000);
        assert_eq!(text(&output, 990)[0].2, "line 990\n");
        output.close().unwrap();
        assert_eq!(text(&output, 0).len(), 1000);
        assert_eq!(text(&output, 7)[0].0, 7);
        assert_eq!(output.dropped(), 0);
        output.discard();
    }

    #[test]
    fn a_few_words_stay_in_memory_and_are_written_down_with_everything_else() {
        let mut short = fresh(1 << 20, "short");
        short.push(Stream::Stdout, b"4".to_vec());
        short.push(Stream::Stderr, b"2".to_vec());
        short.close().unwrap();
        assert!(!short.path.exists());
        let saved = short.saved().unwrap();
        assert!(!saved.spooled && !short.path.exists());
        let back = Output::load(short.path.clone(), 1 << 20, saved).unwrap();
        assert_eq!(text(&back, 0), text(&short, 0));
        assert_eq!(text(&back, 1), [(1, 0, "2".to_owned())]);
        for (count, size) in [(1, FEW_WORDS + 1), (FEW_CHUNKS + 1, 1)] {
            let mut longer = fresh(1 << 20, "longer");
            for _ in 0..count {
                longer.push(Stream::Stdout, vec![b'x'; size]);
                longer.settle(None).unwrap();
            }
            longer.close().unwrap();
            assert!(longer.path.exists() && longer.recent.iter().all(VecDeque::is_empty));
            assert_eq!(text(&longer, 0).len(), count);
            longer.discard();
        }
    }

    /// What is kept of a stream.
    fn kept(output: &Output, stream: Stream) -> Vec<Chunk> {
        let mut all = Vec::new();
        let mut next = 0;
        while let Some(chunk) = output.get(next).unwrap() {
            next = chunk.number + 1;
            all.push(chunk);
        }
        all.retain(|chunk| chunk.stream == stream);
        all
    }

    fn length(chunks: &[Chunk]) -> u64 {
        chunks.iter().map(|chunk| chunk.bytes.len() as u64).sum()
    }

    #[test]
    fn head_and_tail_stay_within_the_limit_and_the_middle_is_counted() {
        for (limit, size) in [(1000, 10_000), (1 << 20, 200_000), (1 << 20, 700), (600_000, 256 << 10)] {
            let mut output = fresh(limit, "limit");
            let total = 3 * limit.max(size);
            for _ in 0..total / size {
                output.push(Stream::Stdout, vec![b'x'; usize::try_from(size).unwrap()]);
                output.settle(None).unwrap();
            }
            let told = output.dropped();
            output.close().unwrap();
            let chunks = kept(&output, Stream::Stdout);
            assert_eq!(chunks[0].offset, 0, "the head is kept");
            let last = chunks.last().unwrap();
            assert_eq!(last.offset + last.bytes.len() as u64, total / size * size, "the tail is kept");
            assert!(length(&chunks) <= limit, "{} bytes of {limit}", length(&chunks));
            assert!(length(&chunks) > limit / 2, "{} bytes of {limit}", length(&chunks));
            assert_eq!((length(&chunks) + told, output.dropped()), (total / size * size, told));
            let gaps =
                chunks.windows(2).filter(|two| two[0].offset + two[0].bytes.len() as u64 != two[1].offset);
            assert_eq!(gaps.count(), 1);
            output.discard();
        }
    }

    #[test]
    fn a_flood_on_one_stream_leaves_the_others_their_tails() {
        let mut output = fresh(1 << 20, "fair");
        let flood = |output: &mut Output| {
            for _ in 0..100 {
                output.push(Stream::Stdout, vec![b'x'; 100_000]);
                output.settle(None).unwrap();
            }
        };
        flood(&mut output);
        output.push(Stream::Stderr, b"the reason\n".to_vec());
        output.push(Stream::Display, vec![b'd'; 200_000]);
        output.push(Stream::Display, vec![b'e'; 100_000]);
        flood(&mut output);
        output.close().unwrap();
        assert_eq!(kept(&output, Stream::Stderr)[0].bytes, b"the reason\n");
        let displays = kept(&output, Stream::Display);
        assert_eq!((displays.len(), displays[0].bytes[0]), (1, b'e'), "the newest that fit, whole");
        let all =
            [Stream::Stdout, Stream::Stderr, Stream::Display].map(|stream| length(&kept(&output, stream)));
        assert!(all.iter().sum::<u64>() <= 1 << 20, "{all:?}");
        output.discard();
    }

    #[test]
    fn what_will_be_dropped_is_known_before_it_is() {
        let mut output = fresh(1 << 20, "known");
        for _ in 0..20 {
            output.push(Stream::Stdout, vec![b'x'; 100_000]);
            output.push(Stream::Display, vec![b'd'; 100_000]);
        }
        let told = output.dropped();
        assert!(
            output.is_awaited(Some(0)) && !output.is_awaited(Some(output.next())) && !output.is_awaited(None)
        );
        output.close().unwrap();
        assert_eq!((output.dropped(), output.is_full()), (told, true));
        let all = length(&kept(&output, Stream::Stdout)) + length(&kept(&output, Stream::Display));
        assert_eq!(all + told, 4_000_000);
        output.discard();
    }

    #[test]
    fn what_a_caller_still_has_to_get_is_not_dropped() {
        let mut output = fresh(0, "wanted");
        for _ in 0..50 {
            output.push(Stream::Stdout, vec![b'y'; 10_000]);
            output.settle(Some(0)).unwrap();
        }
        assert_eq!((output.behind(0), output.dropped()), (500_000, 500_000), "to be dropped, not yet");
        assert_eq!(text(&output, 0).len(), 50);
        output.settle(Some(50)).unwrap();
        assert_eq!((output.behind(0), output.dropped()), (0, 500_000));
    }
}
