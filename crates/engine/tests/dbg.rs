#[test]
fn dbg() {
    let h = carrel_jail::cgroup::Hierarchy::probe();
    println!("{h:?}");
    println!("{:?}", h.create("dbgx", &Default::default()));
    h.remove("dbgx").unwrap();
}
