//! What warm parents load besides what they are told to: the modules that sandboxes of their environment ask for.
//!
//! A sandbox's agent writes down which modules its pythons were asked for by name, also those that they had already. Whoever clears
//! up after the sandbox counts them. A module that enough of the last sandboxes have asked for is loaded by the environment's next
//! parent; one that they ask for no more is not. Only modules that the environment itself has can be loaded there: nothing of a
//! sandbox's is in a parent's box.

use std::io::Read;

use carrel_proto::guest::{IMPORTS, is_module};
use rustix::fs::{Mode, OFlags};

use crate::{Engine, Record, registry::imports::Imports};

/// As many of the last sandboxes as this, and one of so many, have asked for a module that is learned.
const FEW: i64 = 3;
const SHARE: i64 = 5;
/// Modules that are learned at most: the most wanted.
const MOST: usize = 8;
/// Of what an agent has written down.
const MOST_BYTES: u64 = 8 << 10;

impl Imports {
    /// By name, so that they are the same list for as long as they are the same modules.
    fn winners(self) -> Vec<String> {
        let sandboxes = self.sandboxes;
        let is_wanted = |(_, count): &(String, i64)| *count >= FEW && count * SHARE >= sandboxes;
        let mut winners: Vec<String> =
            self.modules.into_iter().filter(is_wanted).take(MOST).map(|(name, _)| name).collect();
        winners.sort();
        winners
    }
}

impl Engine {
    /// Counts what a sandbox has asked for, which is about to be cleared up.
    pub(crate) fn learn_from(&self, record: &Record) {
        let path = self.directory(&record.id).join("spool").join(IMPORTS);
        // Where there is one id for all, user code may have had a hand in it.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else { return };
        let mut text = String::new();
        let read = std::fs::File::from(file).take(MOST_BYTES).read_to_string(&mut text);
        let mut names: Vec<String> = text.lines().filter(|name| is_module(name)).map(str::to_owned).collect();
        names.sort();
        names.dedup();
        if read.is_ok() && !names.is_empty() {
            // Whether one sandbox is counted matters to nobody.
            let _ = self.registry.count_imports(&record.spec.environment, &names);
        }
    }

    /// What a parent of this environment loads besides what it is told to.
    pub(crate) fn learned(&self, environment: &str) -> Vec<String> {
        if !self.environments().warmth().learn {
            return Vec::new();
        }
        self.registry.imports(environment).map(Imports::winners).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Registry;

    #[test]
    fn what_many_ask_for_is_learned_and_forgotten_again() {
        let place = tempfile::tempdir().unwrap();
        let registry = Registry::open(&place.path().join("registry.db")).unwrap();
        let ask = |environment: &str, modules: &[&str]| {
            let modules: Vec<String> = modules.iter().map(|name| (*name).to_owned()).collect();
            registry.count_imports(environment, &modules).unwrap();
        };
        let learned = |environment: &str| registry.imports(environment).unwrap().winners();
        assert_eq!(learned("python"), Vec::<String>::new());
        ask("python", &["json", "numpy"]);
        ask("python", &["json", "numpy"]);
        assert_eq!(learned("python"), Vec::<String>::new());
        ask("python", &["numpy", "decimal"]);
        assert_eq!(learned("python"), ["numpy"]);
        ask("python", &["json"]);
        assert_eq!(learned("python"), ["json", "numpy"]);
        assert_eq!(learned("other"), Vec::<String>::new());
        // Fewer than one of five ask for them from here on.
        for _ in 0..40 {
            ask("python", &["csv"]);
        }
        assert_eq!(learned("python"), ["csv"]);
        // In the long run the table does not grow, and what nobody asks for is not in it.
        for _ in 0..2000 {
            ask("python", &["csv"]);
        }
        let imports = registry.imports("python").unwrap();
        assert!(imports.sandboxes < 256 && imports.modules.len() == 1, "{imports:?}");
        for number in 0..20 {
            for _ in 0..3 {
                ask("many", &[&format!("module{number}")]);
            }
        }
        assert!(learned("many").len() <= MOST);
    }

    #[test]
    fn only_names_of_modules_are() {
        for (name, good) in
            [("numpy", true), ("_x9", true), ("", false), ("9x", false), ("a.b", false), ("a,b", false)]
        {
            assert_eq!(is_module(name), good, "{name}");
        }
        assert!(!is_module(&"x".repeat(65)));
    }
}
