//! Compiles `policy/seccomp.json` for the target, so that nothing parses policy at run time.

use std::{env, error::Error, fmt::Write as _, fs, path::PathBuf};

use seccompiler::TargetArch;

/// System calls of the policy that only x86-64 has; other machines never had them.
const X86_ONLY: &[&str] = &[
    "access",
    "alarm",
    "arch_prctl",
    "chmod",
    "chown",
    "creat",
    "dup2",
    "epoll_create",
    "epoll_wait",
    "eventfd",
    "fork",
    "futimesat",
    "getdents",
    "getpgrp",
    "inotify_init",
    "lchown",
    "link",
    "lstat",
    "mkdir",
    "mknod",
    "open",
    "pause",
    "pipe",
    "poll",
    "readlink",
    "rename",
    "rmdir",
    "select",
    "signalfd",
    "stat",
    "symlink",
    "time",
    "unlink",
    "utime",
    "utimes",
    "vfork",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=policy/seccomp.json");
    let mut policy: serde_json::Value = serde_json::from_str(&fs::read_to_string("policy/seccomp.json")?)?;
    let arch = match env::var("CARGO_CFG_TARGET_ARCH")?.as_str() {
        "x86_64" => TargetArch::x86_64,
        "aarch64" => TargetArch::aarch64,
        other => return Err(format!("carrel has no system call policy for {other}").into()),
    };
    if !matches!(arch, TargetArch::x86_64) {
        for filter in policy.as_object_mut().into_iter().flat_map(|filters| filters.values_mut()) {
            if let Some(rules) = filter["filter"].as_array_mut() {
                rules.retain(|rule| !X86_ONLY.iter().any(|name| rule["syscall"] == *name));
            }
        }
    }
    let compiled = seccompiler::compile_from_json(policy.to_string().as_bytes(), arch)?;
    let mut code = String::new();
    for (name, program) in compiled {
        writeln!(code, "pub(super) const {}: &[Instruction] = &[", name.to_uppercase())?;
        for i in program {
            writeln!(
                code,
                "    Instruction {{ code: {}, jt: {}, jf: {}, k: {} }},",
                i.code, i.jt, i.jf, i.k
            )?;
        }
        writeln!(code, "];")?;
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("seccomp_filters.rs"), code)?;
    Ok(())
}
