//! Compiles `policy/seccomp.json` for the target, so that nothing parses policy at run time.

mod filter_tree;

use std::{env, error::Error, fmt::Write as _, fs, path::PathBuf};

use filter_tree::Instruction;
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
    println!("cargo::rerun-if-changed=filter_tree.rs");
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
    let mut compiled = seccompiler::compile_from_json(policy.to_string().as_bytes(), arch)?;
    let mut take = |name: &str| -> Result<Vec<Instruction>, String> {
        let program = compiled.remove(name).ok_or(format!("the policy has no filter `{name}`"))?;
        Ok(program.into_iter().map(|i| Instruction { code: i.code, jt: i.jt, jf: i.jf, k: i.k }).collect())
    };
    let (absent, allow) = (take("absent")?, take("allow")?);
    let merged = filter_tree::merge(&absent, &allow)?;
    let mut code = write_out("", "FILTER", &merged)?;
    // What the merged filter has to agree with; see the tests of src/seccomp.rs.
    code += &write_out("#[cfg(test)]\n", "ABSENT", &absent)?;
    code += &write_out("#[cfg(test)]\n", "ALLOW", &allow)?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("seccomp_filters.rs"), code)?;
    Ok(())
}

fn write_out(attribute: &str, name: &str, program: &[Instruction]) -> Result<String, std::fmt::Error> {
    let mut code = format!("{attribute}pub(super) const {name}: &[Instruction] = &[\n");
    for Instruction { code: operation, jt, jf, k } in program {
        writeln!(code, "    Instruction {{ code: {operation}, jt: {jt}, jf: {jf}, k: {k} }},")?;
    }
    code += "];\n";
    Ok(code)
}
