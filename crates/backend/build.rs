//! Builds what runs inside a box: the agent and the probes, static, so that they run in any root filesystem.
//!
//! A nested cargo with a target directory of its own (the outer one is locked), the host's own target and a
//! statically linked C library: no further toolchain is needed.

use std::{
    env,
    error::Error,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

const PROGRAMS: [&str; 2] = ["carrel-agent", "carrel-probe"];
const SOURCES: [&str; 7] = ["agent", "files", "graft", "jail", "probe", "proto", "../Cargo.lock"];

fn main() -> Result<(), Box<dyn Error>> {
    let crates = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("..");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", crates.join(source).display());
    }
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let target = env::var("TARGET")?;
    let nested = nested_target(&out);
    let mut cargo = Command::new(env::var("CARGO")?);
    cargo
        .current_dir(crates.join(".."))
        .args(["build", "--quiet", "--profile", "guest", "--target", &target, "--target-dir"])
        .arg(&nested)
        .args(PROGRAMS.iter().flat_map(|name| ["--package", name]));
    // The outer build's settings (lints as errors, coverage, sanitizers) are not for the guest.
    for (name, _) in env::vars().filter(|(name, _)| name.starts_with("CARGO_") && name != "CARGO_HOME") {
        cargo.env_remove(name);
    }
    cargo.env_remove("RUSTC_WORKSPACE_WRAPPER").env_remove("RUSTFLAGS");
    // At fixed addresses: a program that can lie anywhere begins with writing to each of its tables, twice per box, and
    // those pages are then nobody else's.
    let mut flags = vec!["-Ctarget-feature=+crt-static", "-Crelocation-model=static"];
    if target.starts_with("x86_64") {
        // Not where programs of fixed addresses usually lie, python among them: a graft is in its place before it is gone.
        flags.push("-Clink-arg=-Wl,--image-base=0x70000000");
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    if !cargo.status()?.success() {
        return Err("building the programs that run inside a box failed".into());
    }
    for name in PROGRAMS {
        let built = nested.join(&target).join("guest").join(name);
        let program = fs::read(&built).map_err(|error| format!("{}: {error}", built.display()))?;
        fs::write(out.join(name), &program)?;
        let mut hasher = DefaultHasher::new();
        program.hash(&mut hasher);
        let variable = format!("{}_HASH", name.replace('-', "_").to_uppercase());
        println!("cargo::rustc-env={variable}={:016x}", hasher.finish());
    }
    Ok(())
}

/// One nested directory beside the outer one's profiles, shared by debug and release builds.
fn nested_target(out: &Path) -> PathBuf {
    out.ancestors()
        .find(|directory| directory.file_name().is_some_and(|name| name == "build"))
        .and_then(Path::parent)
        .and_then(Path::parent)
        .map_or_else(|| out.join("guest"), |target| target.join("guest-build"))
}
