//! The agent's program is also the graft, which must run before anything else does; see `carrel_graft`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        println!("cargo::rustc-link-arg-bins=-Wl,--entry=carrel_graft_entry");
    }
}
