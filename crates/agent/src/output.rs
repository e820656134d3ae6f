//! What one run or exec printed: numbered chunks with offsets, the newest in memory, the rest in the spool.
//!
//! Chunks go to the spool until the output limit is reached. From then on only a tail stays in memory; what
//! falls between is counted exactly by the offsets. At the end the tail is written behind the head.

use std::{collections::VecDeque, io, path::PathBuf};

use carrel_proto::frame::Stream;

use crate::spool::Spool;

/// What is kept in memory when all of it is in the spool too: nothing is read back for a caller that keeps up.
const TAIL: usize = 64 << 10;

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
    recent: VecDeque<Chunk>,
    recent_bytes: usize,
    next: u64,
    /// Bytes of standard output (or terminal), standard error, displays.
    totals: [u64; 3],
    kept: u64,
    limit: u64,
    dropped: u64,
}

fn slot(stream: Stream) -> usize {
    match stream {
        Stream::Stdin | Stream::Stdout | Stream::Pty => 0,
        Stream::Stderr => 1,
        Stream::Display => 2,
    }
}

impl Output {
    pub(crate) fn new(path: PathBuf, limit: u64) -> Self {
        Self {
            path,
            spool: None,
            recent: VecDeque::new(),
            recent_bytes: 0,
            next: 0,
            totals: [0; 3],
            kept: 0,
            limit,
            dropped: 0,
        }
    }

    /// Number of the chunk that comes next.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn total(&self, stream: Stream) -> u64 {
        self.totals[slot(stream)]
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn push(&mut self, stream: Stream, bytes: Vec<u8>) {
        let total = &mut self.totals[slot(stream)];
        let offset = *total;
        *total += bytes.len() as u64;
        self.recent_bytes += bytes.len();
        self.recent.push_back(Chunk { number: self.next, stream, offset, bytes });
        self.next += 1;
    }

    /// The chunk `number`, or the first kept one after it.
    pub(crate) fn get(&self, number: u64) -> io::Result<Option<Chunk>> {
        if let Some(first) = self.recent.front()
            && number >= first.number
        {
            let at = usize::try_from(number - first.number).unwrap_or(usize::MAX);
            return Ok(self.recent.get(at).cloned());
        }
        if let Some(spool) = &self.spool
            && let Some(chunk) = spool.read(number)?
        {
            return Ok(Some(chunk));
        }
        Ok(self.recent.front().cloned())
    }

    /// Bytes from chunk `number` on that are in memory: how far a follower is behind.
    pub(crate) fn behind(&self, number: u64) -> usize {
        self.recent
            .iter()
            .rev()
            .take_while(|chunk| chunk.number >= number)
            .map(|chunk| chunk.bytes.len())
            .sum()
    }

    /// Moves chunks to the spool and lets memory go, but not what a caller at `wanted` has still to get and would
    /// find nowhere else.
    pub(crate) fn settle(&mut self, wanted: Option<u64>) -> io::Result<()> {
        self.write_out(false)?;
        while self.recent_bytes > TAIL
            && let Some(first) = self.recent.front()
        {
            let spooled = self.spool.as_ref().is_some_and(|spool| first.number < spool.next());
            if !spooled && wanted.is_some_and(|wanted| first.number >= wanted) {
                break;
            }
            // The end stays readable, however large the chunks are: a gap shows only between two of them.
            if !spooled && self.recent_bytes - first.bytes.len() < TAIL {
                break;
            }
            if !spooled {
                self.dropped += first.bytes.len() as u64;
            }
            self.recent_bytes -= first.bytes.len();
            self.recent.pop_front();
        }
        Ok(())
    }

    /// Nothing more comes: the tail goes to disk, memory to the agent.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        self.write_out(true)?;
        if let Some(spool) = &mut self.spool {
            spool.close();
            self.recent.clear();
            self.recent.shrink_to_fit();
            self.recent_bytes = 0;
        }
        Ok(())
    }

    fn write_out(&mut self, whole: bool) -> io::Result<()> {
        for chunk in &self.recent {
            if self.spool.as_ref().is_some_and(|spool| chunk.number < spool.next()) {
                continue;
            }
            if !whole && self.kept >= self.limit {
                break;
            }
            let spool = match &mut self.spool {
                Some(spool) => spool,
                none => none.insert(Spool::create(&self.path)?),
            };
            spool.append(chunk)?;
            self.kept += chunk.bytes.len() as u64;
        }
        Ok(())
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
    fn beyond_the_limit_head_and_tail_stay_and_the_middle_is_counted() {
        let mut output = fresh(1000, "limit");
        for _ in 0..100 {
            output.push(Stream::Stdout, vec![b'x'; 10_000]);
            output.settle(None).unwrap();
        }
        output.close().unwrap();
        let chunks = text(&output, 0);
        assert_eq!(chunks[0].1, 0, "the head is kept");
        let (_, offset, last) = chunks.last().unwrap();
        assert_eq!(offset + last.len() as u64, 1_000_000, "the tail is kept");
        let kept: usize = chunks.iter().map(|(_, _, text)| text.len()).sum();
        assert_eq!(kept as u64 + output.dropped(), 1_000_000);
        output.discard();
    }

    #[test]
    fn the_tail_is_kept_when_one_chunk_is_larger_than_it() {
        let mut output = fresh(1000, "large");
        for _ in 0..10 {
            output.push(Stream::Stdout, vec![b'x'; 4 * TAIL]);
            output.settle(None).unwrap();
        }
        output.close().unwrap();
        let chunks = text(&output, 0);
        let (_, offset, last) = chunks.last().unwrap();
        assert_eq!(offset + last.len() as u64, 40 * TAIL as u64);
        assert_eq!(output.dropped(), 32 * TAIL as u64, "all but the first and the last");
        output.discard();
    }

    #[test]
    fn what_a_caller_still_has_to_get_is_not_dropped() {
        let mut output = fresh(0, "wanted");
        for _ in 0..50 {
            output.push(Stream::Stdout, vec![b'y'; 10_000]);
            output.settle(Some(0)).unwrap();
        }
        assert_eq!(output.dropped(), 0);
        assert_eq!(text(&output, 0).len(), 50);
        output.settle(Some(50)).unwrap();
        assert!(output.dropped() > 0);
    }
}
