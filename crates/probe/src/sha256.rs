//! SHA-256 (FIPS 180-4), so that the host can pass a digest of its canary instead of the canary.

/// The digest of `data` in lower-case hex.
pub(crate) fn hex(data: &[u8]) -> String {
    digest(data).iter().map(|word| format!("{word:08x}")).collect()
}

fn digest(data: &[u8]) -> [u32; 8] {
    let constants = round_constants();
    let mut state = first_bits_of_roots(&FIRST_PRIMES, f64::sqrt);
    let mut padded = data.to_vec();
    padded.push(0x80);
    while padded.len() % 64 != 56 {
        padded.push(0);
    }
    padded.extend_from_slice(&(data.len() as u64 * 8).to_be_bytes());
    for block in padded.chunks_exact(64) {
        compress(&mut state, block, &constants);
    }
    state
}

fn compress(state: &mut [u32; 8], block: &[u8], constants: &[u32; 64]) {
    let mut schedule = [0_u32; 64];
    for (word, bytes) in schedule.iter_mut().zip(block.chunks_exact(4)) {
        *word = bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte));
    }
    for i in 16..64 {
        let (a, b) = (schedule[i - 15], schedule[i - 2]);
        let small = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
        let large = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
        schedule[i] = schedule[i - 16].wrapping_add(small).wrapping_add(schedule[i - 7]).wrapping_add(large);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (constant, word) in constants.iter().zip(schedule) {
        let choice = (e & f) ^ (!e & g);
        let mixed = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let first = h.wrapping_add(mixed).wrapping_add(choice).wrapping_add(*constant).wrapping_add(word);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        let second = (a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22)).wrapping_add(majority);
        (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
    }
    for (word, added) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(added);
    }
}

const FIRST_PRIMES: [u32; 8] = [2, 3, 5, 7, 11, 13, 17, 19];

/// The standard's constants are the first 32 bits of the fractions of cube roots of the first 64 primes.
fn round_constants() -> [u32; 64] {
    let mut primes = [0_u32; 64];
    let mut candidates = (2_u32..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    for slot in &mut primes {
        *slot = candidates.next().unwrap_or_default();
    }
    first_bits_of_roots(&primes, f64::cbrt)
}

fn first_bits_of_roots<const N: usize>(primes: &[u32; N], root: fn(f64) -> f64) -> [u32; N] {
    primes.map(|prime| {
        let scaled = root(f64::from(prime)).fract() * 4_294_967_296.0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a fraction scaled to 32 bits"
        )]
        let bits = scaled as u32;
        bits
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_standard_examples() {
        assert_eq!(super::hex(b""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(super::hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(
            super::hex(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        );
    }
}
