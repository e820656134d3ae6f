//! Files of memory in CRIU's images. The one that a copy of a warm parent has mapped belongs to somebody outside the box, whom
//! its user namespace does not know; the one that CRIU makes in its place, for this session alone, belongs to the box.
//!
//! ```text
//! 19 43 56 54  99 34 45 48        what CRIU's images begin with, and what this one is
//! length (u32), then of each file (protobuf): 1: name, 2: user id, 3: group id …
//! ```

use crate::userns_image::{number, put};

const BEGIN: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x99, 0x34, 0x45, 0x48];
pub(crate) const NAME: &str = "memfd.img";

const UID: u64 = 2 << 3;
const GID: u64 = 3 << 3;
/// How CRIU writes an id that the box does not have.
const NOBODY: u64 = 0xffff_ffff;
/// Who makes them when a session comes back.
const BOX: u64 = 0;

/// The same image with files of nobody's given to the box. One that is written in another way is left for CRIU to judge.
pub(crate) fn with_owners(image: Vec<u8>) -> Vec<u8> {
    changed(&image).unwrap_or(image)
}

fn changed(image: &[u8]) -> Option<Vec<u8>> {
    let mut body = image.strip_prefix(&BEGIN)?;
    let mut told = BEGIN.to_vec();
    while !body.is_empty() {
        let (length, rest) = body.split_first_chunk()?;
        let (mut entry, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        body = rest;
        let mut owned = Vec::new();
        while !entry.is_empty() {
            let field = number(&mut entry)?;
            put(&mut owned, field);
            let value = number(&mut entry)?;
            match field & 7 {
                0 => {
                    put(&mut owned, if [UID, GID].contains(&field) && value == NOBODY { BOX } else { value })
                }
                2 => {
                    let (bytes, rest) = entry.split_at_checked(usize::try_from(value).ok()?)?;
                    put(&mut owned, value);
                    owned.extend(bytes);
                    entry = rest;
                }
                _ => return None,
            }
        }
        told.extend(u32::try_from(owned.len()).ok()?.to_le_bytes());
        told.extend(owned);
    }
    Some(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(owners: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = BEGIN.to_vec();
        for (uid, gid) in owners {
            let mut entry = vec![0x0a, 6];
            entry.extend(b"python");
            for (field, value) in [(UID, *uid), (GID, *gid), (4 << 3, 3_178_496), (6 << 3, NOBODY)] {
                put(&mut entry, field);
                put(&mut entry, value);
            }
            bytes.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    #[test]
    fn what_nobody_owns_is_the_boxs() {
        assert_eq!(with_owners(image(&[(NOBODY, NOBODY), (1000, 1000)])), image(&[(0, 0), (1000, 1000)]));
        assert_eq!(with_owners(image(&[])), image(&[]));
    }

    #[test]
    fn what_is_not_understood_is_left_alone() {
        let real = image(&[(NOBODY, NOBODY)]);
        for length in 0..real.len() {
            let part = real[..length].to_vec();
            // Cut right behind its beginning it is one without files.
            assert_eq!(with_owners(part.clone()), part, "{length}");
        }
        let mut strange = real;
        strange[12] = 0x0d;
        assert_eq!(with_owners(strange.clone()), strange);
    }
}
