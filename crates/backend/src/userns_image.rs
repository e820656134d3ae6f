//! The user namespace of a session in CRIU's images, for other users of the host: a box that comes back as another sandbox has
//! other ids outside, and the same ones inside.
//!
//! ```text
//! 19 43 56 54  06 49 47 55   what CRIU's images begin with, and what this one is
//! length (u32)               of what follows:
//!   1: [1: inside, 2: outside, 3: count]  …   user ids   (protobuf; 1, 2 and 3 are field numbers)
//!   2: [1: inside, 2: outside, 3: count]  …   group ids
//! ```
//! Whatever is not exactly this is refused: half a rewritten map would give files to strangers.

use carrel_jail::userns::{Ids, Mapping};

const BEGIN: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x06, 0x49, 0x47, 0x55];
/// Field numbers with protobuf's kinds: 2 is bytes with a length, 0 a number.
const UIDS: u64 = 1 << 3 | 2;
const GIDS: u64 = 2 << 3 | 2;
const INSIDE: u64 = 1 << 3;
const OUTSIDE: u64 = 2 << 3;
const COUNT: u64 = 3 << 3;

pub(crate) fn is_it(name: &str) -> bool {
    name.starts_with("userns-") && name.ends_with(".img")
}

/// The same image with other ids outside.
pub(crate) fn with_ids(image: &[u8], ids: &Ids) -> Result<Vec<u8>, &'static str> {
    let strange = "its user namespace is written in a way this carrel does not know";
    let body = image.strip_prefix(&BEGIN).ok_or(strange)?;
    let (length, mut body) = body.split_first_chunk().ok_or(strange)?;
    if u32::from_le_bytes(*length) as usize != body.len() {
        return Err(strange);
    }
    let mut told = Vec::new();
    while !body.is_empty() {
        let field = number(&mut body).ok_or(strange)?;
        let length = usize::try_from(number(&mut body).ok_or(strange)?).map_err(|_| strange)?;
        let (extent, rest) = body.split_at_checked(length).ok_or(strange)?;
        body = rest;
        let maps = match field {
            UIDS => &ids.uid,
            GIDS => &ids.gid,
            _ => return Err(strange),
        };
        let extent = other_extent(extent, maps).ok_or(strange)?;
        put(&mut told, field);
        put(&mut told, extent.len() as u64);
        told.extend(extent);
    }
    let length = u32::try_from(told.len()).map_err(|_| strange)?;
    Ok([&BEGIN[..], &length.to_le_bytes(), &told].concat())
}

fn other_extent(mut extent: &[u8], maps: &[Mapping]) -> Option<Vec<u8>> {
    let (mut inside, mut count) = (None, None);
    while !extent.is_empty() {
        let field = number(&mut extent)?;
        let value = number(&mut extent)?;
        match field {
            INSIDE => inside = Some(value),
            OUTSIDE => {}
            COUNT => count = Some(value),
            _ => return None,
        }
    }
    let map = maps.iter().find(|map| Some(u64::from(map.inside)) == inside)?;
    // Boxes map single ids.
    (count == Some(1)).then_some(())?;
    let mut bytes = Vec::new();
    for (field, value) in [(INSIDE, map.inside), (OUTSIDE, map.outside), (COUNT, 1)] {
        put(&mut bytes, field);
        put(&mut bytes, value.into());
    }
    Some(bytes)
}

/// Seven bits per byte, the lowest first; the eighth says that more follow.
pub(crate) fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..63).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

pub(crate) fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value > 0x7f {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As CRIU 4.2.1 wrote it for a box with the ids from 1610612738 on.
    const REAL: &str = "19435654064947553200000\
        00a0a080010828080800618010a0b08e80710838080800618011\
        20a08001082808080061801120b08e8071083808080061801";

    fn real() -> Vec<u8> {
        (0..REAL.len() / 2).map(|at| u8::from_str_radix(&REAL[2 * at..2 * at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn the_same_ids_make_the_same_image() {
        assert_eq!(with_ids(&real(), &Ids::pair(1_610_612_738)).unwrap(), real());
    }

    #[test]
    fn other_ids_are_the_only_change() {
        let other = with_ids(&real(), &Ids::pair(7)).unwrap();
        assert_eq!(with_ids(&other, &Ids::pair(1_610_612_738)).unwrap(), real());
        assert!(other.len() < real().len());
        let largest = with_ids(&real(), &Ids::pair(u32::MAX - 1)).unwrap();
        assert_eq!(with_ids(&largest, &Ids::pair(7)).unwrap(), other);
    }

    #[test]
    fn whatever_else_is_refused() {
        let ids = Ids::pair(7);
        let real = real();
        for length in 0..real.len() {
            assert!(with_ids(&real[..length], &ids).is_err(), "{length}");
        }
        for at in 0..real.len() {
            let mut bad = real.clone();
            bad[at] ^= 0x55;
            // Only the ids outside may have any value.
            let _ = with_ids(&bad, &ids);
        }
        let longer = [&real[..], &[0]].concat();
        assert!(with_ids(&longer, &ids).is_err());
        // A range of ids, as other tools make them.
        let mut range = real.clone();
        range[23] = 2;
        assert!(with_ids(&range, &ids).is_err());
        assert!(with_ids(&real, &Ids::single(7, 7)).is_err());
    }
}
