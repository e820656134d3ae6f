//! Tar as bytes: headers to and fro, long names, pax records and sparse maps. Knows nothing of files.

use std::io::{self, Read};

use super::read_full;

pub(super) const BLOCK: usize = 512;
/// Largest block of metadata: names of [`MAX_DEPTH`](carrel_proto::files::MAX_DEPTH) levels take 32 KiB.
const MAX_META: u64 = 256 << 10;
/// Pieces of one sparse file. A more broken one is refused.
const MAX_PIECES: usize = 1 << 16;
/// Metadata headers before one entry: there are four sorts.
const MAX_PREFIXES: usize = 8;

const GNU_MAGIC: &[u8; 8] = b"ustar  \0";

#[derive(Debug, thiserror::Error)]
pub(super) enum TarError {
    #[error("{0}")]
    Bad(&'static str),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// One entry as the archive has it; nothing in it is trusted yet.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) kind: u8,
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) mode: u32,
    pub(super) mtime: i64,
    /// Bytes in the archive.
    pub(super) stored: u64,
    pub(super) sparse: Option<Sparse>,
}

#[derive(Debug, Default)]
pub(super) struct Sparse {
    /// Offset and length of each piece that is stored, in order.
    pub(super) pieces: Vec<(u64, u64)>,
    pub(super) size: u64,
}

/// Everything before the contents: the header, and a name's own entry when it does not fit.
pub(super) fn encode(kind: u8, path: &[u8], link: &[u8], mode: u32, size: u64, mtime: i64) -> Vec<u8> {
    let mut out = Vec::with_capacity(BLOCK);
    for (sort, long) in [(b'L', path), (b'K', link)] {
        if long.len() > 100 {
            out.extend_from_slice(&header(sort, b"././@LongLink", b"", 0o644, long.len() as u64 + 1, 0));
            out.extend_from_slice(long);
            out.push(0);
            out.resize(out.len().next_multiple_of(BLOCK), 0);
        }
    }
    out.extend_from_slice(&header(kind, path, link, mode, size, mtime));
    out
}

fn header(kind: u8, path: &[u8], link: &[u8], mode: u32, size: u64, mtime: i64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let fit = |bytes: &[u8]| bytes.len().min(100);
    block[..fit(path)].copy_from_slice(&path[..fit(path)]);
    put(&mut block[100..108], i64::from(mode));
    put(&mut block[108..116], 0);
    put(&mut block[116..124], 0);
    put(&mut block[124..136], i64::try_from(size).unwrap_or(i64::MAX));
    put(&mut block[136..148], mtime);
    block[156] = kind;
    block[157..157 + fit(link)].copy_from_slice(&link[..fit(link)]);
    block[257..265].copy_from_slice(GNU_MAGIC);
    let sum = checksum(&block);
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// Octal where it fits, else GNU's big-endian binary with the top bit set.
fn put(field: &mut [u8], value: i64) {
    let digits = field.len() - 1;
    if value >= 0 && value < 1 << (3 * digits) {
        field[..digits].copy_from_slice(format!("{value:0digits$o}").as_bytes());
        field[digits] = 0;
    } else {
        let (sign, start) = (if value < 0 { 0xff } else { 0 }, field.len() - 8);
        field[..start].fill(sign);
        field[start..].copy_from_slice(&value.to_be_bytes());
        field[0] |= 0x80;
    }
}

fn get(field: &[u8]) -> Result<i64, TarError> {
    if field[0] & 0x80 != 0 {
        // Two's complement below the mark; the widest field has 95 bits.
        let first = i128::from(field[0] & 0x3f) - i128::from(field[0] & 0x40);
        let value = field[1..].iter().fold(first, |sum, b| sum << 8 | i128::from(*b));
        return i64::try_from(value).map_err(|_| TarError::Bad("a number in a header is too large"));
    }
    let digits = field.trim_ascii_start();
    let end = digits.iter().position(|b| matches!(b, 0 | b' ')).unwrap_or(digits.len());
    digits[..end].iter().try_fold(0_i64, |sum, b| match b {
        b'0'..=b'7' => Ok(sum << 3 | i64::from(b - b'0')),
        _ => Err(TarError::Bad("a number in a header is not one")),
    })
}

fn checksum(block: &[u8; BLOCK]) -> u32 {
    let field = 148..156;
    block.iter().enumerate().map(|(at, b)| if field.contains(&at) { 32 } else { u32::from(*b) }).sum()
}

fn unsigned(number: i64) -> Result<u64, TarError> {
    u64::try_from(number).map_err(|_| TarError::Bad("a size is negative"))
}

fn until_nul(field: &[u8]) -> Vec<u8> {
    field.split(|b| *b == 0).next().unwrap_or(field).to_vec()
}

/// Reads entry after entry. The contents of one are taken with [`read`](Self::read) before the next is asked for;
/// what is left of them is skipped.
pub(super) struct Reader<R> {
    input: R,
    left: u64,
    padding: u64,
}

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, left: 0, padding: 0 }
    }

    pub(super) fn next(&mut self) -> Result<Option<Entry>, TarError> {
        let mut long_path = None;
        let mut long_link = None;
        let mut pax = Pax::default();
        for _ in 0..MAX_PREFIXES {
            let Some(block) = self.header()? else { return Ok(None) };
            match block[156] {
                b'L' => long_path = Some(until_nul(&self.meta()?)),
                b'K' => long_link = Some(until_nul(&self.meta()?)),
                b'x' => pax = Pax::parse(&self.meta()?)?,
                // Global records (git writes a comment) and volume labels.
                b'g' | b'V' => {}
                kind => {
                    let mut entry = Entry {
                        kind,
                        path: pax
                            .sparse_name
                            .take()
                            .or(pax.path.take())
                            .or(long_path)
                            .unwrap_or(short_path(&block)),
                        link: pax.link.take().or(long_link).unwrap_or(until_nul(&block[157..257])),
                        mode: u32::try_from(get(&block[100..108])? & 0o7777).unwrap_or(0),
                        mtime: pax.mtime.unwrap_or(get(&block[136..148])?),
                        stored: 0,
                        sparse: None,
                    };
                    if let Some(size) = pax.size {
                        self.start(size)?;
                    }
                    // Of what is not a file, old writers state the size of the file without storing it.
                    if matches!(kind, b'1'..=b'6') {
                        self.start(0)?;
                    }
                    if kind == b'S' {
                        entry.sparse = Some(self.gnu_map(&block)?);
                    } else if pax.sparse {
                        entry.sparse = Some(self.pax_map(pax.sparse_size)?);
                    }
                    entry.stored = self.left;
                    return Ok(Some(entry));
                }
            }
        }
        Err(TarError::Bad("too many headers before one entry"))
    }

    /// Up to the next header; its contents become current.
    fn header(&mut self) -> Result<Option<Box<[u8; BLOCK]>>, TarError> {
        let skip = self.left + self.padding;
        if io::copy(&mut (&mut self.input).take(skip), &mut io::sink())? < skip {
            return Err(TarError::Bad("it ends within a file"));
        }
        let block = self.block()?;
        if block.iter().all(|b| *b == 0) {
            return Ok(None);
        }
        if get(&block[148..156])? != i64::from(checksum(&block)) {
            return Err(TarError::Bad("a header's checksum is wrong"));
        }
        self.start(unsigned(get(&block[124..136])?)?)?;
        Ok(Some(block))
    }

    fn start(&mut self, size: u64) -> Result<(), TarError> {
        self.left = size;
        self.padding =
            size.checked_next_multiple_of(BLOCK as u64).ok_or(TarError::Bad("a size is absurd"))? - size;
        self.left.checked_add(self.padding).ok_or(TarError::Bad("a size is absurd"))?;
        Ok(())
    }

    fn block(&mut self) -> Result<Box<[u8; BLOCK]>, TarError> {
        let mut block = Box::new([0; BLOCK]);
        match read_full(&mut self.input, &mut block[..])? {
            BLOCK => Ok(block),
            _ => Err(TarError::Bad("it ends before its end mark")),
        }
    }

    fn meta(&mut self) -> Result<Vec<u8>, TarError> {
        if self.left > MAX_META {
            return Err(TarError::Bad("a name or its attributes are too long"));
        }
        let mut meta = Vec::new();
        self.read_to_end(&mut meta)?;
        if self.left > 0 {
            return Err(TarError::Bad("it ends within a name"));
        }
        Ok(meta)
    }

    /// GNU's own sparse files: pieces in the header and in blocks after it.
    fn gnu_map(&mut self, header: &[u8; BLOCK]) -> Result<Sparse, TarError> {
        let mut sparse = Sparse { pieces: Vec::new(), size: unsigned(get(&header[483..495])?)? };
        sparse.take(&header[386..482])?;
        let mut more = header[482] != 0;
        while more {
            let block = self.block()?;
            sparse.take(&block[..504])?;
            more = block[504] != 0;
        }
        Ok(sparse)
    }

    /// The pax form 1.0: decimal lines at the head of the contents, filled up to a block.
    fn pax_map(&mut self, size: Option<u64>) -> Result<Sparse, TarError> {
        let bad = || TarError::Bad("a sparse map is broken");
        let mut sparse = Sparse { pieces: Vec::new(), size: size.ok_or_else(bad)? };
        let mut block = [0; BLOCK];
        let mut at = BLOCK;
        let mut number = || -> Result<u64, TarError> {
            let mut value = 0_u64;
            loop {
                if at == BLOCK {
                    if read_full(self, &mut block)? < BLOCK {
                        return Err(bad());
                    }
                    at = 0;
                }
                at += 1;
                match block[at - 1] {
                    b'\n' => return Ok(value),
                    digit @ b'0'..=b'9' => {
                        let next = value.checked_mul(10).and_then(|v| v.checked_add(u64::from(digit - b'0')));
                        value = next.ok_or_else(bad)?;
                    }
                    _ => return Err(bad()),
                }
            }
        };
        for _ in 0..number()? {
            sparse.push(number()?, number()?)?;
        }
        Ok(sparse)
    }
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = (&mut self.input).take(self.left).read(buffer)?;
        self.left -= read as u64;
        Ok(read)
    }
}

impl Sparse {
    fn push(&mut self, offset: u64, length: u64) -> Result<(), TarError> {
        if self.pieces.len() >= MAX_PIECES || offset.checked_add(length).is_none_or(|end| end > self.size) {
            return Err(TarError::Bad("a sparse map is broken or too long"));
        }
        self.pieces.push((offset, length));
        Ok(())
    }

    fn take(&mut self, fields: &[u8]) -> Result<(), TarError> {
        for piece in fields.chunks_exact(24).take_while(|piece| piece[0] != 0) {
            self.push(unsigned(get(&piece[..12])?)?, unsigned(get(&piece[12..])?)?)?;
        }
        Ok(())
    }
}

fn short_path(block: &[u8; BLOCK]) -> Vec<u8> {
    let name = until_nul(&block[..100]);
    let prefix = until_nul(&block[345..500]);
    // GNU uses that room for other things.
    if block[257..263] == *b"ustar\0" && !prefix.is_empty() {
        [&prefix, &b"/"[..], &name].concat()
    } else {
        name
    }
}

/// The extended attributes that concern us.
#[derive(Default)]
struct Pax {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<i64>,
    sparse: bool,
    sparse_name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
}

impl Pax {
    /// Records are `length key=value\n`, the length counting all of it.
    fn parse(mut rest: &[u8]) -> Result<Self, TarError> {
        let bad = || TarError::Bad("extended attributes are broken");
        let mut pax = Self::default();
        while !rest.is_empty() {
            let space = rest.iter().take(8).position(|b| *b == b' ').ok_or_else(bad)?;
            let length = decimal(&rest[..space]).and_then(|n| usize::try_from(n).ok()).ok_or_else(bad)?;
            let record = rest.get(space + 1..length).and_then(|r| r.strip_suffix(b"\n")).ok_or_else(bad)?;
            rest = &rest[length..];
            let equals = record.iter().position(|b| *b == b'=').ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let whole = value.split(|b| *b == b'.').next().unwrap_or(value);
            match key {
                b"path" => pax.path = Some(value.to_vec()),
                b"linkpath" => pax.link = Some(value.to_vec()),
                b"size" => pax.size = Some(decimal(value).ok_or_else(bad)?),
                b"mtime" => pax.mtime = decimal(whole).and_then(|n| i64::try_from(n).ok()),
                b"GNU.sparse.major" if value == b"1" => pax.sparse = true,
                b"GNU.sparse.name" => pax.sparse_name = Some(value.to_vec()),
                b"GNU.sparse.realsize" => pax.sparse_size = Some(decimal(value).ok_or_else(bad)?),
                b"GNU.sparse.map" | b"GNU.sparse.numblocks" => {
                    return Err(TarError::Bad("an old sparse form (use GNU.sparse 1.0 or none)"));
                }
                _ => {}
            }
        }
        Ok(pax)
    }
}

fn decimal(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_any_size_survive_their_fields() {
        for value in [0, 1, 0o777, (1 << 33) - 1, 1 << 33, i64::MAX, -1, i64::MIN] {
            let mut field = [b'x'; 12];
            put(&mut field, value);
            assert_eq!(get(&field).unwrap(), value, "{value}");
        }
        assert_eq!(get(b" 644 \0\0\0").unwrap(), 0o644);
        assert_eq!(get(b"00000644").unwrap(), 0o644);
        assert!(get(&[0x9f; 12]).is_err());
        assert!(get(b"12x").is_err());
    }
}
