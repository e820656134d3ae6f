//! The system call filter of user code: an allow-list, compiled from `policy/seccomp.json` at build time.

use std::io;

use crate::sys;

/// One instruction, laid out as the kernel's `sock_filter`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Instruction {
    pub code: u16,
    pub jt: u8,
    pub jf: u8,
    pub k: u32,
}

mod filters {
    use super::Instruction;
    include!(concat!(env!("OUT_DIR"), "/seccomp_filters.rs"));
}

/// Confines this process and its children for good. `no_new_privs` must be set.
///
/// The policy has two parts: `allow` refuses with EPERM what is not listed; `absent` answers ENOSYS for calls whose
/// callers know what to do without them (libc falls back from clone3 to clone).
pub fn confine() -> io::Result<()> {
    sys::seccomp_load(filters::FILTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOW: u32 = 0x7fff_0000;

    /// What the kernel's interpreter makes of a program for one call.
    fn run(program: &[Instruction], data: &[u32; 16]) -> u32 {
        look(program, data).0
    }

    /// The same, and whether the call's arguments were looked at.
    fn look(program: &[Instruction], data: &[u32; 16]) -> (u32, bool) {
        let (mut at, mut a, mut looked) = (0, 0, false);
        loop {
            let i = program[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { i.jt } else { i.jf });
            match i.code {
                0x20 => {
                    a = data[i.k as usize / 4];
                    looked |= i.k >= 16;
                }
                0x54 => a &= i.k,
                0x05 => at += i.k as usize,
                0x15 => at += jump(a == i.k),
                0x25 => at += jump(a > i.k),
                0x35 => at += jump(a >= i.k),
                0x06 => return (i.k, looked),
                code => panic!("an instruction that no filter of ours has: {code:#x}"),
            }
        }
    }

    /// Both parts as the kernel would combine them: the one that forbids, and of two the one loaded last.
    fn expected(data: &[u32; 16]) -> u32 {
        match run(filters::ALLOW, data) {
            ALLOW => run(filters::ABSENT, data),
            refused => refused,
        }
    }

    /// Every constant that the policy compares arguments with, and its neighbours.
    fn interesting() -> Vec<u32> {
        let mut all: Vec<u32> = filters::ALLOW
            .iter()
            .flat_map(|i| [i.k, i.k.wrapping_sub(1), i.k.wrapping_add(1), !i.k])
            .filter(|k| !(20..450).contains(k))
            .chain([0, 0x0002_0000, 0x0200_0000, 0x1000_0000, 0x4000_0000, 0x8000_0000, u32::MAX])
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    #[test]
    fn the_one_filter_says_what_the_two_parts_say() {
        let arch = filters::ALLOW.iter().find(|i| i.code == 0x15).map_or(0, |i| i.k);
        let values = interesting();
        let (mut allowed, mut refused, mut with_rules) = (0, 0, 0);
        // The second run of numbers are those of x32, which share the architecture's name.
        for number in (0..1100).chain(0x4000_0000..0x4000_0400).chain([u32::MAX]) {
            let mut data = [0; 16];
            (data[0], data[1]) = (number, arch);
            assert_eq!(run(filters::FILTER, &data), expected(&data), "{data:x?}");
            if look(filters::ALLOW, &data).1 || look(filters::FILTER, &data).1 {
                with_rules += 1;
                // Each half of the three arguments that rules look at, alone and with the first one set.
                for (slot, value) in (4..10).flat_map(|slot| values.iter().map(move |value| (slot, *value))) {
                    for first in [0, 1, 2, 10, 16, 17] {
                        let mut data = data;
                        data[4] = first;
                        data[slot] = value;
                        assert_eq!(run(filters::FILTER, &data), expected(&data), "{data:x?}");
                    }
                }
            }
            match run(filters::FILTER, &data) {
                ALLOW => allowed += 1,
                _ => refused += 1,
            }
        }
        assert!(allowed > 200 && refused > 1000, "{allowed} allowed, {refused} refused");
        assert!(with_rules >= 5, "{with_rules} with rules");
    }

    #[test]
    fn another_architecture_is_not_let_in() {
        for arch in [0, 0x4000_0003, u32::MAX] {
            let mut data = [0; 16];
            data[1] = arch;
            assert_eq!(run(filters::FILTER, &data), expected(&data));
            assert_ne!(run(filters::FILTER, &data), ALLOW);
        }
    }

    #[test]
    fn the_filter_is_short() {
        assert!(filters::FILTER.len() * 2 < filters::ALLOW.len(), "{} instructions", filters::FILTER.len());
    }
}
