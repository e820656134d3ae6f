//! From the entry point to the parent's next instruction. No library, no allocation, no panic on the way: until the end this
//! runs on the stack that the kernel gave it, afterwards on the parent's.

#![expect(unsafe_code, reason = "the process's own memory is what is being replaced")]

use core::arch::{asm, global_asm};

use crate::format::{
    AUXV_BYTES, FAILED, FILE_BYTES, GO_ON, HEADER_BYTES, Header, IMAGE_FD, Kind, MAGIC, MAX_SEGMENTS,
    MOST_FILES, MappedFile, PAGE, REPLIES_FD, REQUESTS_FD, Registers, SEGMENT_BYTES, Segment,
};

// The agent's entry point. With `graft` for its first argument, and one more at most, it is one; anything else is the agent's own
// business.
global_asm!(
    ".pushsection .text.carrel_graft_entry, \"ax\", @progbits",
    ".globl carrel_graft_entry",
    "carrel_graft_entry:",
    "cmp qword ptr [rsp], 2",
    "jb 2f",
    "cmp qword ptr [rsp], 3",
    "ja 2f",
    "mov rax, qword ptr [rsp + 16]",
    "cmp dword ptr [rax], 0x66617267", // "graf"
    "jne 2f",
    "cmp word ptr [rax + 4], 0x0074", // "t" and the end
    "jne 2f",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {overlay}",
    "ud2",
    "2:",
    "jmp _start",
    ".popsection",
    overlay = sym overlay,
);

unsafe extern "C" {
    // Where this program begins and ends in memory; both linkers that are in use provide them.
    static __executable_start: u8;
    static _end: u8;
}

const READ: u64 = 0;
const WRITE: u64 = 1;
const MMAP: u64 = 9;
const MUNMAP: u64 = 11;
const RT_SIGACTION: u64 = 13;
const PREAD: u64 = 17;
const MREMAP: u64 = 25;
const MADVISE: u64 = 28;
const OPEN: u64 = 2;
const CLOSE: u64 = 3;
const FSTAT: u64 = 5;
const PRCTL: u64 = 157;
const ARCH_PRCTL: u64 = 158;
const SET_TID_ADDRESS: u64 = 218;
const EXIT_GROUP: u64 = 231;
const SET_ROBUST_LIST: u64 = 273;
const RSEQ: u64 = 334;

const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;
const MAP_SHARED: u64 = 1;
const MAP_PRIVATE: u64 = 2;
const MAP_DROPPABLE: u64 = 8;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_GROWSDOWN: u64 = 0x100;
/// Never over something that is there.
const MAP_EXACTLY: u64 = 0x10_0000;
const MADV_HUGEPAGE: u64 = 14;
const MADV_WIPEONFORK: u64 = 18;
const MREMAP_EXACTLY: u64 = 3;
const O_RDONLY_CLOEXEC: u64 = 0o2_000_000;
const PR_SET_NAME: u64 = 15;
const PR_SET_MM: u64 = 35;
const PR_SET_MM_MAP: u64 = 14;
const ARCH_SET_FS: u64 = 0x1002;
const SIG_IGN: u64 = 1;
const AT_NULL: u64 = 0;
const AT_EXECFN: u64 = 31;
const AT_SYSINFO_EHDR: u64 = 33;
const ROBUST_LIST_BYTES: u64 = 24;

const IMAGE: u64 = IMAGE_FD.unsigned_abs() as u64;
const BASE: u64 = IMAGE + 1;
const REQUESTS: u64 = REQUESTS_FD.unsigned_abs() as u64;
const REPLIES: u64 = REPLIES_FD.unsigned_abs() as u64;
/// Descriptors are small; what is larger is an error, or none.
const MAX_FD: u64 = 1 << 20;
const NO_FD: u64 = u64::MAX;

/// What is left free below our own stack, for it to grow.
const STACK_ROOM: u64 = 1 << 20;

/// `struct prctl_mm_map`.
#[repr(C)]
struct Layout {
    addresses: [u64; 11],
    auxv: u64,
    auxv_bytes: u32,
    program: u32,
}

fn call(number: u64, a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> u64 {
    let result: u64;
    // SAFETY: what each call does to this process's memory is justified where it is made; the instruction itself
    // changes only the registers that are named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

fn fail() -> ! {
    loop {
        call(EXIT_GROUP, FAILED.unsigned_abs().into(), 0, 0, 0, 0, 0);
    }
}

/// Closing what is none does nothing.
fn close(fd: u64) {
    call(CLOSE, fd, 0, 0, 0, 0, 0);
}

fn need(ok: bool) {
    if !ok {
        fail();
    }
}

fn word(at: u64) -> u64 {
    // SAFETY: callers read what the kernel has laid out for a new program, or tables whose bounds they have checked.
    unsafe { (at as *const u64).read() }
}

fn byte(at: u64) -> u8 {
    // SAFETY: as above.
    unsafe { (at as *const u8).read() }
}

fn page_up(address: u64) -> u64 {
    (address + PAGE - 1) & !(PAGE - 1)
}

/// What this process has before anything is laid over it.
struct Own {
    start: u64,
    /// Where the tables are mapped, right behind the program.
    tables: u64,
    end: u64,
    stack: (u64, u64),
    vdso: u64,
}

fn map(at: u64, length: u64, protection: u64, flags: u64, fd: u64, offset: u64) {
    let mapped = call(MMAP, at, length, protection, flags | MAP_EXACTLY, fd, offset);
    need(mapped == at);
}

/// Finds stack and vdso from what the kernel has put above the arguments.
fn look_around(stack: u64) -> Own {
    let mut at = stack + 8 * (word(stack) + 2);
    while word(at) != 0 {
        at += 8;
    }
    at += 8;
    let (mut vdso, mut name) = (0, 0);
    while word(at) != AT_NULL {
        match word(at) {
            AT_SYSINFO_EHDR => vdso = word(at + 8),
            AT_EXECFN => name = word(at + 8),
            _ => {}
        }
        at += 16;
    }
    need(vdso != 0 && name != 0);
    // The program's name is the last thing on a stack but for one word.
    while byte(name) != 0 {
        name += 1;
    }
    let start = (&raw const __executable_start) as u64 & !(PAGE - 1);
    let tables = page_up((&raw const _end) as u64);
    Own { start, tables, end: tables, stack: ((stack - STACK_ROOM) & !(PAGE - 1), page_up(name + 9)), vdso }
}

/// Maps the tables and checks that what they say can be read.
fn read_tables(own: &mut Own) -> &'static Header {
    map(own.tables, PAGE, PROT_READ, MAP_PRIVATE, IMAGE, 0);
    need(word(own.tables) == MAGIC);
    let length = word(own.tables + 8);
    need(length & (PAGE - 1) == 0 && length >= PAGE && length < own.stack.0);
    if length > PAGE {
        map(own.tables + PAGE, length - PAGE, PROT_READ, MAP_PRIVATE, IMAGE, PAGE);
    }
    own.end = own.tables + length;
    // SAFETY: the mapping begins with a header, lasts until the very end, and is only read.
    let header = unsafe { &*(own.tables as *const Header) };
    need(header.segments <= MAX_SEGMENTS && header.files <= MAX_SEGMENTS);
    need(HEADER_BYTES + (header.segments + header.files) * SEGMENT_BYTES <= length);
    header
}

fn segment(own: &Own, index: u64) -> &'static Segment {
    // SAFETY: `read_tables` has checked that so many fit; the mapping lasts until the very end.
    unsafe { &*((own.tables + HEADER_BYTES + index * SEGMENT_BYTES) as *const Segment) }
}

fn file(own: &Own, header: &Header, index: u64) -> &'static MappedFile {
    need(index < header.files);
    let at = own.tables + HEADER_BYTES + header.segments * SEGMENT_BYTES;
    // SAFETY: as above; an entry of a file is no longer than a segment's.
    unsafe { &*((at + index * FILE_BYTES) as *const MappedFile) }
}

/// Opens a file of the table, if it is the one that the parent had mapped.
fn open(own: &Own, known: &MappedFile) -> u64 {
    need(own.tables + known.path_at < own.end);
    let fd = call(OPEN, own.tables + known.path_at, O_RDONLY_CLOEXEC, 0, 0, 0, 0);
    need(fd <= MAX_FD);
    let mut status = [0_u64; 18];
    need(call(FSTAT, fd, (&raw mut status) as u64, 0, 0, 0, 0) == 0);
    // `struct stat`: the inode is the second word, then mode and owner, size, … and the times.
    need(status[1] == known.inode && status[6] == known.size);
    need(status[11] == known.modified_s && status[12] == known.modified_ns);
    fd
}

fn overlaps(segment: &Segment, start: u64, end: u64) -> bool {
    segment.start < end && start < segment.end
}

fn lay_out(own: &Own, header: &Header) {
    let moved = header.vdso.wrapping_sub(own.vdso);
    for index in 0..header.segments {
        let it = segment(own, index);
        need(it.start < it.end && it.start & (PAGE - 1) == 0);
        need(!overlaps(it, own.start, own.end) && !overlaps(it, own.stack.0, own.stack.1));
    }
    let (mut open_file, mut fd) = (u64::MAX, NO_FD);
    for index in 0..header.segments {
        let it = segment(own, index);
        let length = it.end - it.start;
        if it.kind == Kind::File as u64 || it.kind == Kind::Shared as u64 {
            if it.file != open_file {
                close(fd);
                fd = open(own, file(own, header, it.file));
                open_file = it.file;
            }
            let how = if it.kind == Kind::File as u64 { MAP_PRIVATE } else { MAP_SHARED };
            map(it.start, length, it.protection, how, fd, it.offset);
        } else if it.kind == Kind::Stored as u64 {
            map(it.start, length, it.protection, MAP_PRIVATE, IMAGE, it.offset);
        } else if it.kind == Kind::Base as u64 {
            map(it.start, length, it.protection, MAP_PRIVATE, BASE, it.offset);
        } else if it.kind == Kind::Zero as u64 || it.kind == Kind::Huge as u64 {
            map(it.start, length, it.protection, MAP_PRIVATE | MAP_ANONYMOUS, NO_FD, 0);
            if it.kind == Kind::Huge as u64 {
                // A kernel without them has small ones.
                call(MADVISE, it.start, length, MADV_HUGEPAGE, 0, 0, 0);
            }
        } else if it.kind == Kind::Stack as u64 {
            let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN;
            map(it.start, length, PROT_READ | PROT_WRITE, flags, NO_FD, 0);
            need(it.stored <= length);
            let copied = call(PREAD, IMAGE, it.end - it.stored, it.stored, it.offset, 0, 0);
            need(copied == it.stored);
        } else if it.kind == Kind::Wiped as u64 {
            map(it.start, length, it.protection, MAP_PRIVATE | MAP_ANONYMOUS, NO_FD, 0);
            need(call(MADVISE, it.start, length, MADV_WIPEONFORK, 0, 0, 0) == 0);
        } else if it.kind == Kind::Droppable as u64 {
            map(it.start, length, it.protection, MAP_DROPPABLE | MAP_ANONYMOUS, NO_FD, 0);
        } else {
            need(it.kind == Kind::System as u64);
            let from = it.start.wrapping_sub(moved);
            need(call(MREMAP, from, length, length, MREMAP_EXACTLY, it.start, 0) == it.start);
        }
    }
    close(fd);
}

/// Memory is laid out, and somebody else writes into it.
fn await_content() {
    let mut byte = GO_ON;
    need(call(WRITE, REPLIES, (&raw const byte) as u64, 1, 0, 0, 0) == 1);
    byte = 0;
    need(call(READ, REQUESTS, (&raw mut byte) as u64, 1, 0, 0, 0) == 1 && byte == GO_ON);
}

/// What the kernel keeps of a process besides its memory.
fn take_state(header: &Header) {
    for number in 1..=64_u64 {
        if header.ignored >> (number - 1) & 1 == 1 {
            let action = [SIG_IGN, 0, 0, 0];
            need(call(RT_SIGACTION, number, (&raw const action) as u64, 0, 8, 0, 0) == 0);
        }
    }
    need(call(PRCTL, PR_SET_NAME, (&raw const header.name) as u64, 0, 0, 0, 0) == 0);
    let layout = Layout {
        addresses: header.layout,
        auxv: (&raw const header.auxv) as u64,
        auxv_bytes: AUXV_BYTES,
        program: u32::MAX,
    };
    let bytes = size_of::<Layout>() as u64;
    need(call(PRCTL, PR_SET_MM, PR_SET_MM_MAP, (&raw const layout) as u64, bytes, 0, 0) == 0);
    need(call(ARCH_PRCTL, ARCH_SET_FS, header.fs_base, 0, 0, 0, 0) == 0);
    let tid = call(SET_TID_ADDRESS, header.tid_at, 0, 0, 0, 0, 0);
    let Ok(tid) = u32::try_from(tid) else { fail() };
    // SAFETY: whoever took the image has seen this word hold the parent's id in memory that is mapped and written to.
    unsafe { (header.tid_at as *mut u32).write(tid) };
    need(call(SET_ROBUST_LIST, header.robust_list, ROBUST_LIST_BYTES, 0, 0, 0, 0) == 0);
    if header.rseq != 0 {
        let registered = call(RSEQ, header.rseq, header.rseq_size, 0, header.rseq_signature, 0, 0);
        need(registered == 0);
    }
    for index in 0..MOST_FILES as u64 {
        close(IMAGE + index);
    }
}

extern "C" fn overlay(stack: u64) -> ! {
    const { assert!(size_of::<MappedFile>() as u64 <= SEGMENT_BYTES) };
    let mut own = look_around(stack);
    let header = read_tables(&mut own);
    lay_out(&own, header);
    // The number of arguments.
    if word(stack) > 2 {
        await_content();
    }
    take_state(header);
    let registers: *const Registers = &raw const header.registers;
    // SAFETY: everything the parent had is in place, and nothing here is used any more. The parent was about to sleep; the
    // instruction that would have done so removes this program instead, and its success is the sleep's.
    unsafe {
        asm!(
            "mov rsp, [r12 + 8]",
            "mov eax, {munmap}",
            "syscall",
            "mov rdi, r13",
            "mov rsi, r14",
            "mov rcx, [r12]",
            "mov rbx, [r12 + 16]",
            "mov rbp, [r12 + 24]",
            "mov rdx, [r12 + 32]",
            "mov r8, [r12 + 40]",
            "mov r9, [r12 + 48]",
            "mov r10, [r12 + 56]",
            "mov r13, [r12 + 72]",
            "mov r14, [r12 + 80]",
            "mov r15, [r12 + 88]",
            "mov r12, [r12 + 64]",
            "mov eax, {munmap}",
            "jmp rcx",
            munmap = const MUNMAP,
            in("r12") registers,
            in("r13") own.start,
            in("r14") own.end - own.start,
            in("rdi") own.stack.0,
            in("rsi") own.stack.1 - own.stack.0,
            options(noreturn),
        )
    }
}
