//! Whole trees as zip archives.
//!
//! Written as a stream: sizes follow their contents, and the directory, which zip wants at the end, is what memory it takes. Read
//! from a file, because that directory alone says what is in it; it is walked entry by entry and never held. What lands where is
//! decided by the same code as for tar, so the same archives are refused. Names are bytes; permissions and symlinks are kept as
//! Info-ZIP does.

mod pack;
mod unpack;

pub use pack::write_zip;
pub use unpack::read_zip;

const LOCAL: u32 = 0x0403_4b50;
const DESCRIPTOR: u32 = 0x0807_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const END_64_LOCATOR: u32 = 0x0706_4b50;

/// Extra fields: large sizes, and times in seconds since 1970.
const LARGE: u16 = 1;
const TIMES: u16 = 0x5455;

const STORED: u16 = 0;
const DEFLATED: u16 = 8;

/// Flags: encrypted; sizes come behind the contents; the name is UTF-8.
const ENCRYPTED: u16 = 1;
const BEHIND: u16 = 1 << 3;
const UTF_8: u16 = 1 << 11;

/// The system whose modes are in an entry's attributes.
const UNIX: u16 = 3;
const MACOS: u16 = 19;

const DAY: i64 = 24 * 3600;

/// A time as MS-DOS wrote it, in UTC: even seconds from 1980 to 2107.
fn dos_time(unix: i64) -> (u16, u16) {
    // The first and the last that fit.
    let unix = unix.clamp(315_532_800, 4_354_819_198);
    let (days, seconds) = (unix.div_euclid(DAY), unix.rem_euclid(DAY));
    // Days since the first of March of the year 0: leap days are last in a year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let part = (5 * of_year + 2) / 153;
    let day = of_year - (153 * part + 2) / 5 + 1;
    let month = if part < 10 { part + 3 } else { part - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let field = |value: i64| u16::try_from(value).unwrap_or(0);
    let date = field(year - 1980) << 9 | field(month) << 5 | field(day);
    let time = field(seconds / 3600) << 11 | field(seconds / 60 % 60) << 5 | field(seconds % 60 / 2);
    (date, time)
}

fn unix_time(date: u16, time: u16) -> i64 {
    let (year, month, day) =
        (i64::from(date >> 9) + 1980, i64::from(date >> 5 & 15).clamp(1, 12), i64::from(date & 31).max(1));
    let year = year - i64::from(month <= 2);
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    days * DAY + i64::from(time >> 11) * 3600 + i64::from(time >> 5 & 63) * 60 + i64::from(time & 31) * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_survive_as_far_as_they_fit() {
        for unix in [315_532_800, 951_782_400, 951_868_798, 1_700_000_000, 4_107_542_398, 4_354_819_198] {
            let (date, time) = dos_time(unix);
            assert_eq!(unix_time(date, time), unix);
        }
        assert_eq!(dos_time(951_782_400), (20 << 9 | 2 << 5 | 29, 0));
        assert_eq!(dos_time(-1), dos_time(315_532_800));
        assert_eq!(dos_time(i64::MAX), dos_time(4_354_819_198));
        let _ = unix_time(u16::MAX, u16::MAX);
        let _ = unix_time(0, 0);
    }
}
