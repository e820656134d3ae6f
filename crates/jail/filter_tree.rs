//! Part of the build script: two linear filters become one binary search over ranges of system call numbers.
//!
//! The kernel runs a new filter once for every system call there is, to remember which ones are always allowed, and then
//! translates it twice. A linear filter makes that quadratic: loading it took longer than starting a shell.
//!
//! The linear programs say what a number means: each is run here for every number until it returns, or asks for an
//! argument of the call. From there on its instructions are copied as they are.

use std::collections::BTreeSet;

/// One instruction, as the kernel's `sock_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;

const ALLOW: u32 = 0x7fff_0000;
/// Above every system call; whatever is higher means the same as this one.
const BEYOND: u32 = 1024;

/// What a filter says of a number.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Action(u32),
    /// Depends on the arguments: these instructions decide.
    Rules(Vec<Instruction>),
}

impl Verdict {
    fn into_code(self) -> Vec<Instruction> {
        match self {
            Verdict::Action(action) => vec![Instruction { code: RETURN, jt: 0, jf: 0, k: action }],
            Verdict::Rules(rules) => rules,
        }
    }
}

/// One filter for both. As in the kernel, what either forbids is forbidden, and `second` has the last word on how.
pub(crate) fn merge(first: &[Instruction], second: &[Instruction]) -> Result<Vec<Instruction>, String> {
    let arch = second
        .iter()
        .find(|i| i.code == JUMP_IF_EQUAL)
        .ok_or("the filter does not look at the architecture")?
        .k;
    for program in [first, second] {
        // Constants that arguments are compared with are among these, too: asking for them does no harm.
        for i in program.iter().filter(|i| i.code == JUMP_IF_EQUAL && i.k > BEYOND) {
            if verdict(program, arch, i.k)? != verdict(program, arch, BEYOND)? {
                return Err(format!("system call {} is beyond the table", i.k));
            }
        }
    }
    let foreign = verdict(second, !arch, NUMBER)?;
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    for number in 0..=BEYOND {
        let verdict = match (verdict(first, arch, number)?, verdict(second, arch, number)?) {
            (Verdict::Action(ALLOW), second) => second,
            (first, Verdict::Action(ALLOW)) => first,
            (Verdict::Action(_), second @ Verdict::Action(_)) => second,
            _ => return Err(format!("both filters have an opinion on system call {number}")),
        };
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((number, verdict));
        }
    }
    let mut code = vec![
        Instruction { code: LOAD, jt: 0, jf: 0, k: ARCH },
        Instruction { code: JUMP_IF_EQUAL, jt: 1, jf: 0, k: arch },
    ];
    code.extend(foreign.into_code());
    if code.len() != 3 {
        return Err("a foreign architecture is not refused at once".into());
    }
    code.push(Instruction { code: LOAD, jt: 0, jf: 0, k: NUMBER });
    code.extend(tree(&ranges));
    Ok(code)
}

/// Runs a linear filter for one number.
fn verdict(program: &[Instruction], arch: u32, number: u32) -> Result<Verdict, String> {
    let (mut at, mut loaded) = (0, 0);
    loop {
        let i = program.get(at).ok_or("a filter without an end")?;
        at += 1;
        match (i.code, i.k) {
            (LOAD, NUMBER) => loaded = number,
            (LOAD, ARCH) => loaded = arch,
            (LOAD, _) => return Ok(Verdict::Rules(rules(program, at - 1)?)),
            (JUMP, k) => at += k as usize,
            (JUMP_IF_EQUAL, k) => at += usize::from(if loaded == k { i.jt } else { i.jf }),
            (RETURN, action) => return Ok(Verdict::Action(action)),
            (code, _) => return Err(format!("an unexpected instruction {code:#x}")),
        }
    }
}

/// Everything that can be reached from `start`, which is one piece because filters only jump forward.
fn rules(program: &[Instruction], start: usize) -> Result<Vec<Instruction>, String> {
    let (mut open, mut seen) = (vec![start], BTreeSet::new());
    while let Some(at) = open.pop() {
        let i = program.get(at).ok_or("a jump out of the filter")?;
        if i.code == LOAD && i.k == NUMBER {
            return Err("the rules of one system call run into those of the next".into());
        }
        if !seen.insert(at) || i.code == RETURN {
            continue;
        }
        match (i.code, i.code & 0x07) {
            (JUMP, _) => open.push(at + 1 + i.k as usize),
            (_, JUMP) => open.extend([at + 1 + usize::from(i.jt), at + 1 + usize::from(i.jf)]),
            _ => open.push(at + 1),
        }
    }
    let end = seen.last().map_or(start, |last| last + 1);
    Ok(program[start..end].to_vec())
}

fn tree(ranges: &[(u32, Verdict)]) -> Vec<Instruction> {
    let (left, right) = ranges.split_at(ranges.len() / 2);
    let Some((first, _)) = right.first() else { return Vec::new() };
    if left.is_empty() {
        return right[0].1.clone().into_code();
    }
    let (left, right) = (tree(left), tree(right));
    let mut code = match u8::try_from(left.len()) {
        Ok(over) => vec![Instruction { code: JUMP_IF_AT_LEAST, jt: over, jf: 0, k: *first }],
        // A conditional jump reaches 255 instructions, a plain one any.
        Err(_) => vec![
            Instruction { code: JUMP_IF_AT_LEAST, jt: 0, jf: 1, k: *first },
            Instruction { code: JUMP, jt: 0, jf: 0, k: u32::try_from(left.len()).unwrap_or(u32::MAX) },
        ],
    };
    code.extend(left);
    code.extend(right);
    code
}
