//! Images that stay for long are packed: each file of one by itself, by zstd.
//!
//! ```text
//! IMAGE/manifest.json      says that it is packed; the checksums in it are still those of what was packed
//!       agent.json.zst …   every other file, under its name with [`END`]
//! ```
//! A packed image is another directory beside the first; whoever keeps images puts it in the other's place. CRIU reads none
//! of it: an image is unpacked before it is brought back, and what comes out is checked on the way.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Component, Path},
};

use zstd::stream::{read, write};

/// What the name of a packed file ends with.
pub(crate) const END: &str = ".zst";
/// The fastest: it makes a tenth of python's memory, and no more of a faster machine is asked for than this.
const LEVEL: i32 = 1;
/// Largest window that is accepted, as a power of two: 8 MB. A frame could ask for gigabytes.
const WINDOW: u32 = 23;
const BUFFER: usize = 256 << 10;

/// CRC-32 and length of what a file holds.
pub(crate) type Sum = (u32, u64);

/// Names are those of an image's own files; one that says otherwise was not written by us.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

fn packed_name(name: &str) -> String {
    format!("{name}{END}")
}

/// Packs one file; says what was in it. `None`: it was told to stop.
pub(crate) fn pack_file(
    from: &Path,
    to: &Path,
    name: &str,
    go_on: &dyn Fn() -> bool,
) -> io::Result<Option<Sum>> {
    let target = to.join(packed_name(name));
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut source = File::open(from.join(name))?;
    let mut packer = write::Encoder::new(File::create(target)?, LEVEL)?;
    packer.include_checksum(true)?;
    let sum = pour(&mut source, &mut packer, u64::MAX, go_on)?;
    packer.finish()?;
    Ok(sum)
}

/// Unpacks one file of at most `most` bytes; says what was in it.
pub(crate) fn unpack_file(from: &Path, to: &Path, name: &str, most: u64) -> io::Result<Sum> {
    let target = to.join(name);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut source = read::Decoder::new(File::open(from.join(packed_name(name)))?)?;
    source.window_log_max(WINDOW)?;
    // One byte more tells a file that is longer from one that is right.
    let sum = pour(&mut source, &mut File::create(target)?, most.saturating_add(1), &|| true)?;
    Ok(sum.unwrap_or((0, 0)))
}

fn pour(
    from: &mut impl Read,
    to: &mut impl Write,
    most: u64,
    go_on: &dyn Fn() -> bool,
) -> io::Result<Option<Sum>> {
    let mut hasher = crc32fast::Hasher::new();
    let (mut buffer, mut length) = (vec![0; BUFFER], 0_u64);
    while length < most {
        if !go_on() {
            return Ok(None);
        }
        let wanted = usize::try_from(most - length).unwrap_or(BUFFER).min(BUFFER);
        let count = from.read(&mut buffer[..wanted])?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
        length += count as u64;
    }
    Ok(Some((hasher.finalize(), length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_comes_out_as_it_was_and_no_longer() {
        let place = std::env::temp_dir().join(format!("carrel-packed-{}", std::process::id()));
        let (whole, packed, back) = (place.join("whole"), place.join("packed"), place.join("back"));
        fs::create_dir_all(whole.join("0")).unwrap();
        let content: Vec<u8> = (0..1_000_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        fs::write(whole.join("0/pages-1.img"), &content).unwrap();
        let sum = pack_file(&whole, &packed, "0/pages-1.img", &|| true).unwrap().unwrap();
        assert_eq!(sum, (crc32fast::hash(&content), content.len() as u64));
        let size = fs::metadata(packed.join("0/pages-1.img.zst")).unwrap().len();
        assert!(size < sum.1 / 2, "{size}");
        assert_eq!(unpack_file(&packed, &back, "0/pages-1.img", sum.1).unwrap(), sum);
        assert_eq!(fs::read(back.join("0/pages-1.img")).unwrap(), content);
        // One that would fill the disk is not let out, and one that is told to stop stops.
        assert_eq!(unpack_file(&packed, &back, "0/pages-1.img", 1000).unwrap().1, 1001);
        assert_eq!(pack_file(&whole, &packed, "0/pages-1.img", &|| false).unwrap(), None);
        fs::remove_dir_all(place).unwrap();
    }

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        assert!(is_plain("agent.json") && is_plain("0/core-1.img"));
        for bad in ["", "/etc/passwd", "../x", "0/../../x", "."] {
            assert!(!is_plain(bad), "{bad}");
        }
    }
}
