//! `--json` and docs/cli-json.md say the same: every object that a command prints has the fields of its row, and no others.

use std::{collections::BTreeMap, iter::Peekable, str::Chars};

use serde_json::Value;

use crate::support::{Ended, Place, sandboxes};

const PAGE: &str = include_str!("../../../../docs/cli-json.md");
const ROWS: &str = "## Other commands";
/// Named shapes, described below the table.
const NAMED: [&str; 4] = ["SANDBOX", "SNAPSHOT", "TOKEN", "ENTRY"];
/// Rows whose object is compared by hand: its names are the user's own.
const BY_HAND: [&str; 1] = ["config show"];

#[derive(Debug, Clone)]
enum Shape {
    Any,
    /// Fields, and whether one may be missing.
    Object(BTreeMap<String, (Shape, bool)>),
    List(Box<Shape>),
}

/// Reads shapes as the page writes them: `{a, b: [SANDBOX and {c?}]}`.
struct Reader<'a> {
    text: Peekable<Chars<'a>>,
    named: &'a BTreeMap<&'static str, Shape>,
}

impl Reader<'_> {
    fn skip(&mut self) {
        while self.text.next_if(|c| c.is_whitespace() || *c == '`').is_some() {}
    }

    fn word(&mut self) -> String {
        self.skip();
        let mut word = String::new();
        while let Some(c) = self.text.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
            word.push(c);
        }
        word
    }

    fn takes(&mut self, wanted: char) -> bool {
        self.skip();
        self.text.next_if_eq(&wanted).is_some()
    }

    fn shape(&mut self) -> Shape {
        let shape = if self.takes('[') {
            let inner = self.shape();
            while !self.takes(']') {
                self.text.next().expect("a list ends");
            }
            Shape::List(Box::new(inner))
        } else if self.takes('{') {
            Shape::Object(self.fields())
        } else {
            let word = self.word();
            self.named.get(word.as_str()).cloned().unwrap_or(Shape::Any)
        };
        let Shape::Object(mut fields) = shape else { return shape };
        let mut ahead = self.text.clone().filter(|c| *c != '`').take(6);
        if ahead.by_ref().collect::<String>() == " and {" {
            self.word();
            self.word();
            assert!(self.takes('{'));
            fields.extend(self.fields());
        }
        Shape::Object(fields)
    }

    fn fields(&mut self) -> BTreeMap<String, (Shape, bool)> {
        let mut fields = BTreeMap::new();
        loop {
            let name = self.word();
            assert!(
                !name.is_empty(),
                "a field without a name at {:?}",
                self.text.clone().take(20).collect::<String>()
            );
            let optional = self.takes('?');
            let shape = if self.takes(':') { self.shape() } else { Shape::Any };
            fields.insert(name, (shape, optional));
            if self.takes('}') {
                return fields;
            }
            assert!(
                self.takes(','),
                "fields are divided by commas: {:?}",
                self.text.clone().take(20).collect::<String>()
            );
        }
    }
}

impl Shape {
    fn of(text: &str, named: &BTreeMap<&'static str, Shape>) -> Self {
        Reader { text: text.chars().peekable(), named }.shape()
    }

    fn check(&self, value: &Value, at: &str) {
        match (self, value) {
            (Shape::Any, _) | (_, Value::Null) => {}
            (Shape::List(shape), Value::Array(all)) => all.iter().for_each(|value| shape.check(value, at)),
            (Shape::Object(fields), Value::Object(found)) => {
                for (name, (shape, optional)) in fields {
                    match found.get(name) {
                        Some(value) => shape.check(value, &format!("{at}.{name}")),
                        None => assert!(optional, "{at} has no `{name}`: {value}"),
                    }
                }
                for name in found.keys() {
                    assert!(fields.contains_key(name), "`{name}` of {at} is not described: {value}");
                }
            }
            _ => panic!("{at} is something else than {self:?}: {value}"),
        }
    }
}

/// Every row with its first shape.
fn page() -> BTreeMap<String, Shape> {
    let (_, rest) = PAGE.split_once(ROWS).unwrap();
    let mut named = BTreeMap::new();
    for name in NAMED {
        let (_, text) = rest.split_once(&format!("\n{name} is ")).unwrap();
        let shape = Shape::of(text, &named);
        assert!(matches!(shape, Shape::Object(_)), "{name}");
        named.insert(name, shape);
    }
    let mut rows = BTreeMap::new();
    for line in rest.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').splitn(2, " | ").collect();
        let commands: Vec<&str> = cells[0].split('`').skip(1).step_by(2).collect();
        if BY_HAND.contains(&commands[0]) {
            continue;
        }
        let family = commands[0].split_once(' ').map(|(family, _)| family);
        for command in &commands {
            // `files stat`, `mkdir`, `mv`: the later ones are of the first one's family.
            let name = match family {
                Some(family) if !command.contains(' ') => format!("{family} {command}"),
                _ => (*command).to_owned(),
            };
            let shape = Shape::of(cells[1], &named);
            assert!(matches!(shape, Shape::Object(_)), "{name} has no object");
            rows.insert(name, shape);
        }
    }
    rows
}

/// Commands that were tried, with the rows that they belong to.
struct Trial<'a> {
    place: &'a Place,
    rows: BTreeMap<String, Shape>,
}

impl Trial<'_> {
    /// Tries a row once, and gives the object.
    fn row(&mut self, row: &str, args: &[&str]) -> Value {
        let value = self.again(row, args);
        self.rows.remove(row);
        value
    }

    fn again(&self, row: &str, args: &[&str]) -> Value {
        let shape = self.rows.get(row).unwrap_or_else(|| panic!("there is no row `{row}`"));
        let mut command = self.place.command(&[&["--json"], args].concat());
        let ended = Ended::of(command.env("HOME", self.place.path().join("home")).output().unwrap());
        let value = ended.json();
        assert!(value.get("error").is_none_or(|error| error.is_null()), "{args:?}: {value}");
        shape.check(&value, row);
        value
    }
}

#[test]
fn every_object_has_the_fields_of_its_row_and_no_others() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut trial = Trial { place: &place, rows: page() };
    trial.again("open", &["open", "work", "--label", "team=a"]);
    trial.row("open", &["open", "work"]);
    place.run(&["run", "-s", "work", "-e", "bash", "ln -s a l; echo hi > a; mkfifo go"]).with(0);
    place.run(&["run", "-s", "work", "x = 1"]).with(0);
    place.run(&["run", "-s", "work", "x = 2; x"]).with(0);
    let id =
        place.run(&["exec", "-d", "work", "--", "sh", "-c", "echo one; cat go"]).with(0).trim().to_owned();
    trial.again("logs", &["logs", "work", &id]);
    trial.row("kill", &["kill", "work", &id]);
    trial.row("wait", &["wait", "work", &id]);
    trial.row("logs", &["logs", "work", &id]);
    trial.row("brief", &["brief", "work"]);
    trial.row("undo", &["undo", "work"]);
    trial.row("ls", &["ls"]);
    trial.row("inspect", &["inspect", "work"]);
    files(&mut trial);
    let doctor = trial.row("doctor", &["doctor"]);
    sleep_and_snapshots(&mut trial, &doctor);
    trial.row("close", &["close", "work"]);
    tokens_and_clients(&mut trial);
    let left: Vec<&String> = trial.rows.keys().collect();
    assert!(left.is_empty(), "rows that nothing here tries: {left:?}");
    place.run(&["close", "--all"]).with(0);
}

fn files(trial: &mut Trial<'_>) {
    std::fs::write(trial.place.work().join("up"), "from the host\n").unwrap();
    trial.row("cp", &["cp", "up", "work:there"]);
    trial.row("files ls", &["files", "ls", "work"]);
    trial.row("files stat", &["files", "stat", "work", "l"]);
    trial.row("files mkdir", &["files", "mkdir", "work", "d"]);
    trial.row("files mv", &["files", "mv", "work", "there", "d/there"]);
    trial.row("files cat", &["files", "cat", "work", "a"]);
    trial.row("files search", &["files", "search", "work", "host"]);
    trial.row("files rm", &["files", "rm", "work", "a"]);
}

fn sleep_and_snapshots(trial: &mut Trial<'_>, doctor: &Value) {
    if doctor["standby"]["works"] == true {
        trial.row("standby", &["standby", "work"]);
        trial.row("wake", &["wake", "work"]);
    }
    if doctor["hibernation"]["works"] == true {
        trial.row("hibernate", &["hibernate", "work"]);
        trial.place.run(&["wake", "work"]).with(0);
    }
    let taken = trial.row("snapshot", &["snapshot", "work"]);
    let id = taken["id"].as_str().unwrap();
    trial.row("diff", &["diff", id, "work"]);
    let forked = trial.row("fork", &["fork", "work"]);
    trial.row("adopt", &["adopt", forked["forks"][0]["id"].as_str().unwrap()]);
    trial.row("restore", &["restore", id, "--as", "other"]);
    trial.row("snapshots", &["snapshots"]);
    // What this host cannot do is not tried; that it says so is tested elsewhere.
    for row in ["standby", "wake", "hibernate"] {
        if trial.rows.remove(row).is_some() {
            println!("skipped: {row}: {} {}", doctor["standby"], doctor["hibernation"]);
        }
    }
}

fn tokens_and_clients(trial: &mut Trial<'_>) {
    let made = trial.row("token create", &["token", "create", "--name", "a", "--quota", "sandboxes=2"]);
    trial.row("token list", &["token", "list"]);
    trial.row("token revoke", &["token", "revoke", made["id"].as_str().unwrap()]);
    trial.row("mcp install CLIENT --print", &["mcp", "install", "claude-code", "--print"]);
    trial.row("mcp install CLIENT", &["mcp", "install", "claude-code"]);
    trial.row("mcp install", &["mcp", "install"]);
    let shown = trial.place.run(&["config", "show", "--json"]).json();
    for (name, setting) in shown["settings"].as_object().unwrap() {
        assert!(setting.get("value").is_some() && setting["from"].is_string(), "{name}: {setting}");
    }
    assert_eq!(shown["environments"]["python"]["preset"], "python");
    assert!(shown["files"].is_array());
}
