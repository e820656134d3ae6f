use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
};

use super::*;

const SMALL: Limits = Limits { entries: 8, bytes: 64 << 10, shared_bytes: 64 << 10, times: 2 };

struct Place {
    workspace: tempfile::TempDir,
    spool: tempfile::TempDir,
    changes: Changes,
    root: Root,
    store: Rc<Store>,
}

impl Place {
    fn new(limits: Limits) -> Self {
        let (workspace, spool) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = workspace.path().to_owned();
        let changes = Changes::new(path.to_str().unwrap().to_owned());
        let root = Root::open(&path).unwrap();
        let store = Store::new(spool.path().to_owned(), path, limits);
        Self { workspace, spool, changes, root, store }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.workspace.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.at(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap()
    }

    fn copy_by(&mut self, old: Option<&Tree>, until: Instant) -> Result<Copied, Reason> {
        self.changes.refresh(Duration::from_secs(5));
        copy(&self.root, &self.changes, old, false, &self.store, until)
    }

    fn copy(&mut self, old: Option<&Tree>) -> Result<Copied, Reason> {
        self.copy_by(old, Instant::now() + Duration::from_secs(60))
    }

    fn put_back(&mut self, tree: &Tree) -> Result<(), Reason> {
        self.changes.refresh(Duration::from_secs(5));
        tree.put_back(&self.root, &self.changes, false)
    }
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn trees_share_what_has_not_changed_and_let_go_of_what_nobody_has() {
    let mut place = Place::new(SMALL);
    place.write("a", &"a".repeat(5000));
    place.write("b", "b");
    let first = place.copy(None).unwrap();
    assert!(first.differs);
    assert_eq!(place.store.used.get(), 3 * BLOCK);
    assert_eq!(fs::read_dir(place.spool.path()).unwrap().count(), 0, "what is kept has no name");
    assert!(!place.copy(Some(&first.tree)).unwrap().differs);
    place.write("b", "c");
    let second = place.copy(Some(&first.tree)).unwrap();
    assert!(second.differs);
    assert_eq!(place.store.used.get(), 4 * BLOCK);
    drop(first);
    assert_eq!(place.store.used.get(), 3 * BLOCK);
    drop(second);
    assert_eq!((place.store.used.get(), place.store.file.get().unwrap().metadata().unwrap().len()), (0, 0));
}

#[test]
fn a_tree_is_put_back_whatever_has_become_of_it() {
    let mut place = Place::new(Limits::USUAL);
    fs::create_dir(place.at("d")).unwrap();
    place.write("d/in", "in");
    place.write("a", "a");
    symlink("/etc/shadow", place.at("link")).unwrap();
    fs::set_permissions(place.at("a"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(place.at("d"), fs::Permissions::from_mode(0o1711)).unwrap();
    let inode = fs::metadata(place.at("a")).unwrap().ino();
    let tree = place.copy(None).unwrap().tree;
    place.write("a", "another");
    fs::remove_dir_all(place.at("d")).unwrap();
    // A directory that has become a link out must not be written through.
    let outside = tempfile::tempdir().unwrap();
    symlink(outside.path(), place.at("d")).unwrap();
    fs::remove_file(place.at("link")).unwrap();
    fs::create_dir_all(place.at("link/deep")).unwrap();
    place.put_back(&tree).unwrap();
    assert_eq!((place.read("a"), place.read("d/in")), ("a".to_owned(), "in".to_owned()));
    assert_eq!((mode(&place.at("a")), mode(&place.at("d"))), (0o4711, 0o1711));
    assert_eq!(fs::metadata(place.at("a")).unwrap().ino(), inode, "it is the same file");
    assert_eq!(fs::read_link(place.at("link")).unwrap(), Path::new("/etc/shadow"));
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    place.changes.refresh(Duration::from_secs(5));
    assert!(tree.has_names_of(&place.changes));
    assert!(!place.copy(Some(&tree)).unwrap().differs);
}

#[test]
fn two_names_of_one_file_come_apart_again() {
    let mut place = Place::new(SMALL);
    place.write("a", "a");
    place.write("b", "b");
    let tree = place.copy(None).unwrap().tree;
    fs::remove_file(place.at("b")).unwrap();
    fs::hard_link(place.at("a"), place.at("b")).unwrap();
    fs::hard_link(place.at("a"), place.at("c")).unwrap();
    place.write("a", "both");
    assert!(place.copy(Some(&tree)).unwrap_err().contains("several names"));
    place.put_back(&tree).unwrap();
    assert_eq!((place.read("a"), place.read("b")), ("a".to_owned(), "b".to_owned()));
    assert!(!place.at("c").exists());
}

#[test]
fn bounds_are_kept_and_said() {
    let mut place = Place::new(SMALL);
    place.write("a", &"x".repeat(60 << 10));
    let first = place.copy(None).unwrap();
    place.write("a", &"y".repeat(60 << 10));
    let second = place.copy(Some(&first.tree)).unwrap();
    // Each fits, but not a third one beside them.
    place.write("a", &"z".repeat(60 << 10));
    assert!(place.copy(Some(&second.tree)).unwrap_err().contains("what calls have changed"));
    drop((first, second));
    place.copy(None).unwrap();
    let late = Instant::now();
    assert!(place.copy_by(None, late).unwrap_err().contains("too long"));
    place.write("b", &"z".repeat(5 << 10));
    assert!(place.copy(None).unwrap_err().contains("larger than 0 MB"));
    fs::remove_file(place.at("b")).unwrap();
    for n in 0..SMALL.entries {
        place.write(&n.to_string(), "");
    }
    assert!(place.copy(None).unwrap_err().contains("more than 8 files"));
    assert_eq!(place.store.used.get(), 0);
}

#[test]
fn what_cannot_be_made_again_is_left_alone() {
    let mut place = Place::new(SMALL);
    let socket = std::os::unix::net::UnixListener::bind(place.at("socket")).unwrap();
    place.write("a", "a");
    let tree = place.copy(None).unwrap().tree;
    place.write("a", "b");
    place.put_back(&tree).unwrap();
    assert_eq!(place.read("a"), "a");
    place.write("a", "b");
    drop(socket);
    fs::remove_file(place.at("socket")).unwrap();
    assert!(place.put_back(&tree).unwrap_err().contains("cannot be made again"));
    assert_eq!(place.read("a"), "b", "all or nothing");
}

#[test]
fn a_file_that_another_has_taken_the_place_of_is_not_overwritten() {
    let mut place = Place::new(SMALL);
    place.write("a", "a");
    let tree = place.copy(None).unwrap().tree;
    place.write("a", "b");
    place.changes.refresh(Duration::from_secs(5));
    // From outside, after the look.
    place.write("new", "theirs");
    fs::rename(place.at("new"), place.at("a")).unwrap();
    let error = tree.put_back(&place.root, &place.changes, false).unwrap_err();
    assert!(error.contains("not all files could be put back"), "{error}");
    assert_eq!(place.read("a"), "theirs");
}

#[test]
fn a_second_change_within_a_tick_is_found() {
    let mut place = Place::new(SMALL);
    place.write("a", "1");
    let first = place.copy(None).unwrap();
    for text in ["2", "3", "4"] {
        let before = fs::metadata(place.at("a")).unwrap();
        place.write("a", text);
        // As a kernel with a coarse clock would leave it; the time of its last change cannot be set, so it is only this likely.
        fs::File::options()
            .write(true)
            .open(place.at("a"))
            .unwrap()
            .set_modified(before.modified().unwrap())
            .unwrap();
        let copied = place.copy(Some(&first.tree)).unwrap();
        assert!(copied.differs, "{text}");
        place.put_back(&first.tree).unwrap();
        assert_eq!(place.read("a"), "1");
    }
}
