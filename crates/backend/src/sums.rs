//! Checksums of all files of a tree. Memory of a sandbox is one big file, so big ones are read in parts, by as many threads as
//! there are processors.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use crc32fast::Hasher;

use crate::packed::Sum;

const PART: u64 = 4 << 20;
/// Of a reader. It stays in a processor's cache.
const BUFFER: usize = 256 << 10;
/// Readers beside the first: the disk is not faster than these.
const MOST: usize = 3;

struct Part {
    name: String,
    path: PathBuf,
    at: u64,
}

/// By their names below `root`, without those that are not `wanted`.
pub(crate) fn of_tree(root: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<BTreeMap<String, Sum>> {
    let parts = parts_of(root, wanted)?;
    let next = AtomicUsize::new(0);
    let read = || -> io::Result<Vec<(usize, Hasher, u64)>> {
        let (mut done, mut buffer) = (Vec::new(), vec![0; BUFFER]);
        while let Some((number, part)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|number| Some((number, parts.get(number)?)))
        {
            let (hasher, length) = sum_of(part, &mut buffer)?;
            done.push((number, hasher, length));
        }
        Ok(done)
    };
    // A thread takes longer to start than a small image to be read.
    let more = match parts.iter().any(|part| part.at > 0) {
        true => thread::available_parallelism().map_or(0, |count| count.get() - 1).min(MOST),
        false => 0,
    };
    let mut done = thread::scope(|scope| -> io::Result<_> {
        // As many as can be had.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, read).ok();
        let others: Vec<_> = (0..more).filter_map(spawn).collect();
        let mut done = read()?;
        for other in others {
            done.extend(other.join().map_err(|_| io::Error::other("a reader has ended"))??);
        }
        Ok(done)
    })?;
    done.sort_unstable_by_key(|(number, ..)| *number);
    let mut sums: BTreeMap<String, (Hasher, u64)> = BTreeMap::new();
    for (number, hasher, length) in done {
        let whole = sums.entry(parts[number].name.clone()).or_default();
        whole.0.combine(&hasher);
        whole.1 += length;
    }
    Ok(sums.into_iter().map(|(name, (hasher, length))| (name, (hasher.finalize(), length))).collect())
}

fn parts_of(root: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<Vec<Part>> {
    let mut parts = Vec::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root.join(&directory))? {
            let entry = entry?;
            let name = directory.join(entry.file_name());
            let meta = entry.metadata()?;
            if meta.is_dir() {
                directories.push(name);
            } else if wanted(&entry.file_name().to_string_lossy()) {
                let name = name.to_string_lossy().into_owned();
                // One that is empty has a part as well.
                for number in 0..meta.len().div_ceil(PART).max(1) {
                    parts.push(Part { name: name.clone(), path: entry.path(), at: number * PART });
                }
            }
        }
    }
    Ok(parts)
}

fn sum_of(part: &Part, buffer: &mut [u8]) -> io::Result<(Hasher, u64)> {
    let file = File::open(&part.path)?;
    let (mut hasher, mut length) = (Hasher::new(), 0);
    while length < PART {
        let most = buffer.len().min(usize::try_from(PART - length).unwrap_or(usize::MAX));
        match file.read_at(&mut buffer[..most], part.at + length)? {
            0 => break,
            count => {
                hasher.update(&buffer[..count]);
                length += count as u64;
            }
        }
    }
    Ok((hasher, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_parts_has_the_sum_of_the_whole() {
        let place = tempfile::tempdir().unwrap();
        let long: Vec<u8> = (0..PART * 2 + 77).map(|number| (number % 251) as u8).collect();
        fs::create_dir(place.path().join("0")).unwrap();
        fs::write(place.path().join("0/long"), &long).unwrap();
        fs::write(place.path().join("exact"), &long[..usize::try_from(PART).unwrap()]).unwrap();
        fs::write(place.path().join("empty"), b"").unwrap();
        fs::write(place.path().join("left-out"), b"x").unwrap();
        let sums = of_tree(place.path(), |name| name != "left-out").unwrap();
        let sum = |bytes: &[u8]| (crc32fast::hash(bytes), bytes.len() as u64);
        let expected = [
            ("0/long", sum(&long)),
            ("empty", sum(b"")),
            ("exact", sum(&long[..usize::try_from(PART).unwrap()])),
        ];
        assert_eq!(sums, expected.map(|(name, sum)| (name.to_owned(), sum)).into());
        fs::remove_file(place.path().join("0/long")).unwrap();
        assert!(!of_tree(place.path(), |_| true).unwrap().contains_key("0/long"));
    }
}
