//! The brief: where a session stands, gathered without running any of its code.
//!
//! Most of it is seen from outside: jobs, ports, files, limits, working directories. What an idle interpreter holds is asked of
//! its driver, which looks without calling anything of the user's (docs/drivers.md). One that is at a call is never asked: the
//! question would wait behind the call. One that does not answer in time is said to be silent, and is left alone; its
//! answer, should it come, is taken note of and nothing more.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::{Duration, Instant},
};

use carrel_proto::{
    brief::{
        Brief, Environment, Failure, InterpreterBrief, InterpreterState, Job, Left, MAX_ERRORS, MAX_LINE,
        MAX_VARIABLES, MAX_WORD, Variable, clip,
    },
    guest::Language,
    id::{ExecId, SessionName},
    message::{Event, What},
    outcome::{Outcome, ProcessInfo},
    problem::{Code, Problem},
};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    drivers,
    poll::Token,
    process,
    process::Role,
    receipt::{described, left_below},
    serve::Agent,
};

/// A driver needs a few milliseconds, unless something keeps it from running at all.
const PATIENCE: Duration = Duration::from_millis(500);
/// A shell with more memory than this may have so many variables that bash would take seconds to list them.
const BIG_SHELL: u64 = 8 << 20;
/// Names of one list.
const MOST: usize = 20;
/// Variables that interpreters and shells set for themselves.
const OWN: [&str; 7] = ["PWD", "OLDPWD", "SHLVL", "_", "MPLBACKEND", "LC_CTYPE", "CARREL_SITE"];

/// A brief whose drivers have not all answered.
#[derive(Debug)]
pub(crate) struct Inquiry {
    pub(crate) connection: u32,
    tag: u32,
    pub(crate) deadline: Instant,
    brief: Brief,
    /// Interpreters that were asked, and where their part is.
    open: Vec<(u32, usize)>,
    set: BTreeSet<String>,
    unset: BTreeSet<String>,
}

/// What a driver says. User code shares its process: it may be anything.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Told {
    variables: Vec<Variable>,
    total: u64,
    partial: bool,
    /// Environment variables that are not as they were given.
    set: Vec<String>,
    unset: Vec<String>,
}

impl Agent {
    /// Begins to gather; answers at once if nobody has to be asked.
    pub(crate) fn brief(
        &mut self,
        caller: u32,
        tag: u32,
        name: &SessionName,
    ) -> Result<Option<Event>, Problem> {
        let Some(session) = self.sessions.get(name) else {
            let word = format!("there is no session `{name}` in this sandbox");
            return Err(Problem::new(Code::SessionNotFound, word).hint("open it first"));
        };
        let set: BTreeSet<String> = session.own.keys().cloned().collect();
        let (cwd, age) = (session.cwd.clone(), session.opened.elapsed().unwrap_or_default());
        let processes = self.processes_of(name);
        let ports = self.listeners();
        let mut brief = Brief {
            session: name.clone(),
            cwd,
            age_ms: millis(age),
            interpreters: Vec::new(),
            environment: Environment::default(),
            jobs: Vec::new(),
            jobs_total: 0,
            ports_total: u64::try_from(ports.len()).unwrap_or(u64::MAX),
            ports: ports.into_iter().take(MOST).collect(),
            files: self.changes.all(),
            errors: self.failures(name),
            left: self.left(),
        };
        let mut open = Vec::new();
        for id in processes {
            if let Some((part, asked)) = self.interpreter_brief(id) {
                if asked {
                    open.push((id, brief.interpreters.len()));
                }
                brief.interpreters.push(part);
            }
        }
        let deadline = Instant::now() + PATIENCE;
        self.inquiries.push(Inquiry {
            connection: caller,
            tag,
            deadline,
            brief,
            open,
            set,
            unset: BTreeSet::new(),
        });
        self.settle_inquiries(Instant::now());
        Ok(None)
    }

    /// An interpreter from outside, and whether its driver was asked for more.
    fn interpreter_brief(&mut self, id: u32) -> Option<(InterpreterBrief, bool)> {
        let interpreter = self.interpreters.get(&id).filter(|interpreter| !interpreter.unasked)?;
        let main = self.processes.get(&id).and_then(|process| process.runner.main());
        let cwd = main.and_then(|pid| fs::read_link(format!("/proc/{pid}/cwd")).ok());
        let exec = interpreter.current;
        let busy = exec.and_then(|number| self.execs.get(&number)?.running_for());
        let state = match exec {
            Some(_) => InterpreterState::Busy,
            None if !interpreter.ready => InterpreterState::Starting,
            // Until it answers.
            None => InterpreterState::Silent,
        };
        let part = InterpreterBrief {
            language: interpreter.language,
            state,
            exec: exec.map(ExecId::numbered),
            busy_ms: busy.map(millis),
            waiting: u32::try_from(interpreter.queue.len()).unwrap_or(u32::MAX),
            cwd: cwd.map(|path| clip(&path.to_string_lossy(), MAX_LINE)),
            variables: Vec::new(),
            variables_total: 0,
            partial: false,
        };
        if state != InterpreterState::Silent || interpreter.mute.is_some() {
            return Some((part, false));
        }
        if interpreter.language == Language::Bash
            && main.is_some_and(|pid| process::sum(&[pid]).0 > BIG_SHELL)
        {
            return Some((InterpreterBrief { state: InterpreterState::Idle, partial: true, ..part }, false));
        }
        let asked = self.ask_driver(id);
        Some((part, asked))
    }

    /// Asks, unless an earlier question is still open: its answer serves both.
    fn ask_driver(&mut self, id: u32) -> bool {
        let mut given: BTreeMap<String, String> = self.config.variables.clone();
        given.insert("HOME".into(), self.config.places.home.clone());
        let number = self.next_exec;
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return false };
        if interpreter.asked.is_some() {
            return true;
        }
        match drivers::question(interpreter.language, &self.config.places.run, id, number, &given) {
            Ok(question) => {
                interpreter.asked = Some(number);
                interpreter.unsent.extend_from_slice(&question);
                if !interpreter.flush() {
                    let _ = self.poller.writable(&interpreter.requests, Token::Requests(id));
                }
                true
            }
            Err(error) => {
                crate::say(&format!("asking {}: {error}", interpreter.language.as_str()));
                false
            }
        }
    }

    /// A driver's answer.
    pub(crate) fn heard_brief(&mut self, id: u32, number: u64, told: &RawValue) {
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        if interpreter.asked != Some(number) {
            return;
        }
        interpreter.asked = None;
        let told: Told = serde_json::from_str(told.get()).unwrap_or_default();
        for inquiry in &mut self.inquiries {
            if let Some(at) = inquiry.open.iter().position(|(asked, _)| *asked == id) {
                let (_, part) = inquiry.open.swap_remove(at);
                inquiry.add(part, &told);
            }
        }
        self.settle_inquiries(Instant::now());
    }

    /// Answers those that are complete, or have waited long enough.
    pub(crate) fn settle_inquiries(&mut self, now: Instant) {
        let mut done = Vec::new();
        for (at, inquiry) in self.inquiries.iter_mut().enumerate() {
            inquiry.open.retain(|(id, _)| self.interpreters.contains_key(id));
            if inquiry.open.is_empty() || inquiry.deadline <= now {
                done.push(at);
            }
        }
        for at in done.into_iter().rev() {
            let mut inquiry = self.inquiries.swap_remove(at);
            // Last: by now every driver that was asked has said which of its processes are not the user's.
            let brief = &mut inquiry.brief;
            (brief.jobs, brief.jobs_total) = self.jobs(&self.processes_of(&brief.session));
            let (connection, tag) = (inquiry.connection, inquiry.tag);
            self.reply(connection, tag, &Event::Brief(Box::new(inquiry.finish())));
        }
    }

    fn processes_of(&self, session: &SessionName) -> Vec<u32> {
        self.processes.iter().filter(|(_, process)| process.session == *session).map(|(id, _)| *id).collect()
    }

    /// Commands of the session that run, and what its processes have left in the background.
    fn jobs(&self, processes: &[u32]) -> (Vec<Job>, u64) {
        let (mut jobs, mut total) = (Vec::new(), 0);
        for id in processes {
            let Some(process) = self.processes.get(id) else { continue };
            if let Role::Exec(number) = process.role
                && !process.ended
            {
                let argv = match self.execs.get(&number).map(|exec| &exec.what) {
                    Some(What::Exec { argv }) => argv.join(" "),
                    _ => String::new(),
                };
                total += 1;
                jobs.push(Job {
                    exec: Some(ExecId::numbered(number)),
                    pid: None,
                    command: clip(&argv, MAX_WORD),
                });
                continue;
            }
            let left = left_below(&process.runner, process.ended, &self.spares_of(*id));
            total += u64::try_from(left.len()).unwrap_or(u64::MAX);
            let room = MOST.saturating_sub(jobs.len());
            let known: Vec<ProcessInfo> = left.into_iter().take(room).filter_map(described).collect();
            jobs.extend(known.into_iter().map(Job::from));
        }
        jobs.truncate(MOST);
        (jobs, total)
    }

    fn failures(&self, session: &SessionName) -> Vec<Failure> {
        let failed = self.execs.iter().rev().filter(|(_, exec)| exec.session == *session);
        failed.filter_map(|(_, exec)| failure(exec.outcome()?)).take(MAX_ERRORS).collect()
    }

    fn left(&self) -> Left {
        let usage = self.usage(Duration::ZERO);
        let limits = &self.config.limits;
        let lifetime = Duration::from_secs(self.config.max_lifetime_s).saturating_sub(self.started.elapsed());
        Left {
            memory: limits.memory.0.saturating_sub(usage.memory),
            memory_limit: limits.memory.0,
            disk: usage.disk_limit.saturating_sub(usage.disk_used),
            disk_limit: usage.disk_limit,
            pids: u64::from(limits.pids.saturating_sub(usage.processes)),
            pids_limit: limits.pids.into(),
            lifetime_ms: millis(lifetime),
            output: limits.output.0,
        }
    }
}

impl Inquiry {
    fn add(&mut self, part: usize, told: &Told) {
        let names = |list: &[String]| -> Vec<String> {
            let wanted = list.iter().filter(|name| !OWN.contains(&name.as_str()));
            wanted.take(MAX_VARIABLES).map(|name| clip(name, MAX_WORD)).collect()
        };
        self.set.extend(names(&told.set));
        self.unset.extend(names(&told.unset));
        let Some(interpreter) = self.brief.interpreters.get_mut(part) else { return };
        interpreter.state = InterpreterState::Idle;
        interpreter.variables_total = told.total;
        interpreter.partial = told.partial;
        interpreter.variables = told
            .variables
            .iter()
            .take(MAX_VARIABLES)
            .map(|variable| Variable {
                name: clip(&variable.name, MAX_WORD),
                kind: clip(&variable.kind, MAX_WORD),
                shape: variable.shape.as_deref().map(|text| clip(text, MAX_WORD)),
                size: variable.size,
                value: variable.value.as_deref().map(|text| clip(text, MAX_WORD)),
            })
            .collect();
    }

    fn finish(self) -> Brief {
        let total = |names: &BTreeSet<String>| u64::try_from(names.len()).unwrap_or(u64::MAX);
        let environment = Environment {
            set_total: total(&self.set),
            unset_total: total(&self.unset),
            set: self.set.into_iter().take(MOST).collect(),
            unset: self.unset.into_iter().take(MOST).collect(),
        };
        Brief { environment, ..self.brief }
    }
}

/// A call that did not end well, in a line.
fn failure(outcome: &Outcome) -> Option<Failure> {
    let first = |text: &str| clip(text.lines().next().unwrap_or_default(), MAX_LINE);
    let (name, message) = match (&outcome.exception, &outcome.problem) {
        (Some(exception), _) => (clip(&exception.name, MAX_WORD), first(&exception.message)),
        (None, Some(problem)) => (problem.code.as_str().to_owned(), first(&problem.message)),
        (None, None) if outcome.exit_code != 0 => ("exit".to_owned(), outcome.exit_code.to_string()),
        (None, None) => return None,
    };
    Some(Failure { exec: outcome.exec.clone(), name, message })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
