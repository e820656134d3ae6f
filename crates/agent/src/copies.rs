//! Interpreters that are copies of a warm parent instead of being started. What a copy is and how one is made is in
//! [`carrel_graft`].
//!
//! Whether there is an image is the host's decision, whether it is used is taken here, and any doubt speaks for starting: a
//! copy that does not say that it is ready is replaced by an interpreter that was started, before anybody's code has run, and
//! this box makes no more copies.

use std::{collections::BTreeMap, fs::OpenOptions, io::Write, os::fd::OwnedFd, path::PathBuf};

use carrel_graft::format::ARGUMENT;
use carrel_proto::guest::{IMPORTS, Language, Places, is_module};
use serde_json::json;

use crate::serve::Agent;

/// Variables that an interpreter, its libraries and the modules it may have loaded look at only once, when they start.
const LOOKED_AT_ONCE: [&str; 14] = [
    "PYTHON",
    "LC_",
    "LANG",
    "TZ",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "BLIS_",
    "NUMEXPR_",
    "MPL",
    "GOTO_",
];

/// How a copy comes to life: in place of a program with arguments and variables.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) argv: &'static [&'static str],
    /// The files of its image.
    pub(crate) images: Vec<OwnedFd>,
    /// What it is sent first.
    pub(crate) greeting: Vec<u8>,
}

/// Whether an interpreter with variables `own` would have started as one with variables `parent` has.
fn starts_alike(parent: &BTreeMap<String, String>, own: &BTreeMap<String, String>) -> bool {
    let matters = |name: &&String| LOOKED_AT_ONCE.iter().any(|prefix| name.starts_with(prefix));
    let names = || parent.keys().chain(own.keys()).filter(matters);
    names().all(|name| parent.get(name) == own.get(name))
}

/// Names of modules that are written down for the host: no more than anybody needs to learn from.
const MOST_IMPORTS: usize = 64;

impl Agent {
    /// User code has asked for these modules: written down for whoever clears up after this box.
    pub(crate) fn heard_imports(&mut self, names: &[String]) {
        let mut new = String::new();
        for name in names.iter().filter(|name| is_module(name)) {
            if self.imports.len() < MOST_IMPORTS && self.imports.insert(name.clone()) {
                new.push_str(name);
                new.push('\n');
            }
        }
        if new.is_empty() {
            return;
        }
        let path = PathBuf::from(&self.config.places.spool).join(IMPORTS);
        let file = OpenOptions::new().create(true).append(true).open(path);
        // It is nobody's loss.
        let _ = file.and_then(|mut file| file.write_all(new.as_bytes()));
    }

    /// A copy in place of a new interpreter, if that would be the same.
    pub(crate) fn copy(&self, language: Language, env: &BTreeMap<String, String>) -> Option<Copy> {
        let image = self.image.as_ref().filter(|_| language == Language::Python)?;
        if !starts_alike(&self.config.variables, env) {
            return None;
        }
        Some(Copy {
            argv: &[Places::AGENT, ARGUMENT],
            images: vec![image.try_clone().ok()?],
            greeting: format!("{}\n", json!({ "variables": env })).into_bytes(),
        })
    }

    /// A copy has ended before it was ready: an interpreter is started instead. `false`: it was none.
    pub(crate) fn start_instead(&mut self, id: u32) -> bool {
        if !self.interpreters.get(&id).is_some_and(|interpreter| interpreter.unproven) {
            return false;
        }
        let Some(interpreter) = self.interpreters.remove(&id) else { return false };
        crate::say("a copy of the warm parent did not come to life; interpreters are started from now on");
        self.image = None;
        self.poller.forget(&interpreter.replies);
        self.poller.forget(&interpreter.requests);
        let Some(process) = self.processes.get(&id) else { return true };
        let session = process.session.clone();
        process.runner.kill_all();
        match self.start_interpreter(&session, interpreter.language) {
            Ok(new) => self.queue_for(new, interpreter.queue),
            Err(error) => self.refuse_all(interpreter.language, interpreter.queue, &error),
        }
        true
    }
}
