//! One `carrel.toml`: read strictly, every mistake with its line.

use std::path::{Path, PathBuf};

use carrel_api::mcp::ToolSet;
use carrel_engine::Source;
use carrel_proto::{
    guest::Language,
    problem::{Code, Problem},
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::keys::{Key, Kind, Value, nearest};

/// Larger is no configuration.
const MAX_FILE: u64 = 1 << 20;

/// Who wrote a file, and so what it may say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Author {
    User,
    /// Whoever wrote the project in the current directory.
    Project,
}

/// What a file says, with lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) values: Vec<(Key, Value, usize)>,
    pub(crate) environments: Vec<(String, Source, usize)>,
    /// What `carrel mcp` offers for an environment.
    pub(crate) tools: Vec<(String, ToolSet)>,
    /// How many calls can be taken back in an environment.
    pub(crate) undo_calls: Vec<(String, u32)>,
}

/// Reads a file. `None`: there is none.
pub(crate) fn read(path: &Path, author: Author) -> Result<Option<Said>, Problem> {
    let failed = |error: std::io::Error| {
        Problem::new(Code::Config, format!("{}: {error}", path.display()))
            .hint("make it readable, or name another file with --config")
    };
    let size = match std::fs::metadata(path) {
        Ok(meta) => meta.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if size > MAX_FILE {
        return Err(Problem::new(
            Code::Config,
            format!("{} is larger than {MAX_FILE} bytes", path.display()),
        ));
    }
    parse(path, &std::fs::read_to_string(path).map_err(failed)?, author).map(Some)
}

fn parse(path: &Path, text: &str, author: Author) -> Result<Said, Problem> {
    let file = File { path, text, author };
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        file.problem(at, error.message()).hint("docs/configuration.md shows the format")
    })?;
    let mut said = Said::default();
    for (name, value) in table.get_ref() {
        match (name.get_ref().as_ref(), value.get_ref()) {
            ("environments", DeValue::Table(table)) => file.environments(table, &mut said)?,
            ("environments", _) => return Err(file.wrong(name, "environments", "a table")),
            (section, DeValue::Table(table)) if Key::SECTIONS.contains(&section) => {
                for (name, value) in table {
                    file.setting(Some(section), name, value, &mut said)?;
                }
            }
            (section, _) if Key::SECTIONS.contains(&section) => {
                return Err(file.wrong(name, section, "a table"));
            }
            _ => file.setting(None, name, value, &mut said)?,
        }
    }
    Ok(said)
}

type Name<'a> = Spanned<std::borrow::Cow<'a, str>>;

struct File<'a> {
    path: &'a Path,
    text: &'a str,
    author: Author,
}

impl File<'_> {
    fn line(&self, at: usize) -> usize {
        self.text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1
    }

    fn problem(&self, at: usize, what: impl std::fmt::Display) -> Problem {
        Problem::new(Code::Config, format!("{}:{}: {what}", self.path.display(), self.line(at)))
    }

    fn wrong(&self, name: &Name<'_>, dotted: &str, wanted: &str) -> Problem {
        self.problem(name.span().start, format!("`{dotted}` must be {wanted}"))
            .hint("docs/configuration.md has examples")
    }

    fn unknown<'k>(
        &self,
        name: &Name<'_>,
        dotted: &str,
        known: impl Iterator<Item = &'k str> + Clone,
    ) -> Problem {
        let problem = self.problem(name.span().start, format!("there is no setting `{dotted}`"));
        match nearest(dotted, known.clone()) {
            Some(near) => problem.hint(format!("did you mean `{near}`?")),
            None => problem.hint(format!("known settings: {}", known.collect::<Vec<_>>().join(", "))),
        }
    }

    fn setting(
        &self,
        section: Option<&str>,
        name: &Name<'_>,
        value: &Spanned<DeValue<'_>>,
        said: &mut Said,
    ) -> Result<(), Problem> {
        let dotted = match section {
            Some(section) => format!("{section}.{}", name.get_ref()),
            None => name.get_ref().to_string(),
        };
        let Some(key) = Key::ALL.into_iter().find(|key| key.name() == dotted) else {
            let sections = Key::SECTIONS.into_iter().chain(["environments"]);
            let keys = Key::ALL.iter().map(|key| key.name());
            return Err(self.unknown(name, &dotted, keys.chain(sections.filter(|_| section.is_none()))));
        };
        let at = value.span().start;
        if self.author == Author::Project && !key.in_project_file() {
            return Err(self
                .problem(at, format!("`{dotted}` cannot be set by a project"))
                .hint(format!("set it in your own carrel.toml, as {}, or as a flag", key.variable())));
        }
        let Some(text) = written(key.kind(), value.get_ref()) else {
            return Err(self.wrong(name, &dotted, key.kind().wanted()));
        };
        let value = key.kind().parse(&text).map_err(|why| {
            self.problem(at, format!("`{dotted}`: {why}"))
                .hint("docs/configuration.md lists what each setting may be")
        })?;
        let value = match value {
            Value::Path(path) => Value::Path(self.below(&path)),
            other => other,
        };
        if let (Author::Project, Key::ProjectDirectory, Value::Path(path)) = (self.author, key, &value) {
            self.inside(at, path)?;
        }
        said.values.push((key, value, self.line(at)));
        Ok(())
    }

    /// Relative paths are meant from where the file is.
    fn below(&self, path: &Path) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("/")).join(path)
    }

    /// A project shows itself to a sandbox, and nothing else of its user's.
    fn inside(&self, at: usize, path: &Path) -> Result<(), Problem> {
        let own = self.path.parent().unwrap_or(Path::new("/"));
        let real = |path: &Path| {
            std::fs::canonicalize(path)
                .map_err(|error| self.problem(at, format!("{}: {error}", path.display())))
        };
        if real(path)?.starts_with(real(own)?) {
            return Ok(());
        }
        Err(self
            .problem(at, "`project.directory` leads out of the project")
            .hint("name other directories with --project or in your own carrel.toml"))
    }

    fn environments(&self, table: &DeTable<'_>, said: &mut Said) -> Result<(), Problem> {
        for (name, value) in table {
            let dotted = format!("environments.{}", name.get_ref());
            let DeValue::Table(fields) = value.get_ref() else {
                return Err(self.wrong(name, &dotted, "a table"));
            };
            if name.get_ref().parse::<carrel_proto::id::SessionName>().is_err() {
                let what = format!("`{}` cannot be an environment's name", name.get_ref());
                return Err(self
                    .problem(name.span().start, what)
                    .hint("use letters, digits, `.`, `_` and `-`"));
            }
            let mut source = None;
            for (field, value) in fields {
                let dotted = format!("{dotted}.{}", field.get_ref());
                let at = value.span().start;
                let text = |text| match value.get_ref() {
                    DeValue::String(string) => Ok(string.as_ref()),
                    _ => Err(self.wrong(field, text, "a string")),
                };
                let found = match field.get_ref().as_ref() {
                    "tools" => {
                        let set = ToolSet::parse(text(&dotted)?)
                            .map_err(|why| self.problem(at, format!("`{dotted}`: {why}")))?;
                        said.tools.push((name.get_ref().to_string(), set));
                        continue;
                    }
                    "undo_calls" => {
                        let kind = Key::UndoCalls.kind();
                        let Some(written) = written(kind, value.get_ref()) else {
                            return Err(self.wrong(field, &dotted, kind.wanted()));
                        };
                        let calls = kind
                            .parse(&written)
                            .map_err(|why| self.problem(at, format!("`{dotted}`: {why}")))?;
                        if let Value::Count(calls) = calls {
                            said.undo_calls.push((name.get_ref().to_string(), calls));
                        }
                        continue;
                    }
                    "preset" => {
                        let text = text(&dotted)?;
                        let language = Language::parse(text).ok_or_else(|| {
                            let names = Language::ALL.map(Language::as_str).join(", ");
                            self.problem(at, format!("`{dotted}`: there is no preset `{text}`"))
                                .hint(format!("presets: {names}"))
                        })?;
                        Source::Preset(language)
                    }
                    "sandbox" => Source::Artifact(self.below(Path::new(text(&dotted)?))),
                    _ => {
                        let near = nearest(field.get_ref(), ["preset", "sandbox", "tools", "undo_calls"]);
                        let hint = near
                            .map_or("known: preset, sandbox, tools, undo_calls".to_owned(), |near| {
                                format!("did you mean `{near}`?")
                            });
                        return Err(self
                            .problem(field.span().start, format!("there is no setting `{dotted}`"))
                            .hint(hint));
                    }
                };
                if source.replace(found).is_some() {
                    return Err(self
                        .problem(at, format!("`{}` has both a preset and a sandbox", name.get_ref()))
                        .hint("choose one"));
                }
            }
            let line = self.line(name.span().start);
            let source = source.ok_or_else(|| {
                self.problem(name.span().start, format!("`{dotted}` says neither preset nor sandbox"))
                    .hint("preset = \"python\" or sandbox = \"/path/to/artifact\"")
            })?;
            said.environments.push((name.get_ref().to_string(), source, line));
        }
        Ok(())
    }
}

/// The value as it would be written in a variable; `None`: another type was wanted.
fn written(kind: Kind, value: &DeValue<'_>) -> Option<String> {
    match (kind, value) {
        (Kind::Size | Kind::Word(_) | Kind::Path | Kind::Url, DeValue::String(text)) => {
            Some(text.to_string())
        }
        (kind, DeValue::Array(all)) if kind.is_list() => {
            let each = all.iter().map(|one| match one.get_ref() {
                DeValue::String(text) if !text.contains(',') => Some(text.as_ref()),
                _ => None,
            });
            Some(each.collect::<Option<Vec<&str>>>()?.join(","))
        }
        (
            Kind::Size | Kind::Time { .. } | Kind::Count | Kind::UpTo(_) | Kind::Cpus,
            DeValue::Integer(number),
        ) if number.radix() == 10 => Some(number.as_str().to_owned()),
        (Kind::Cpus, DeValue::Float(number)) => Some(number.as_str().to_owned()),
        (Kind::Flag, DeValue::Boolean(flag)) => Some(flag.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Result<Said, Problem> {
        parse(Path::new("/home/me/carrel.toml"), text, Author::User)
    }

    #[test]
    fn a_whole_file_is_understood() {
        let text = "[session]\nidle_timeout_seconds = 60\n[limits]\ncpus = 1.5\nmemory = \"1GB\"\n\
                    [environments.science]\nsandbox = \"art/science\"\n[environments.js]\npreset = \"node\"\ntools = \"code\"\n";
        let said = said(text).unwrap();
        let values: Vec<String> =
            said.values.iter().map(|(key, value, line)| format!("{line} {} {value}", key.name())).collect();
        assert_eq!(
            values,
            ["4 limits.cpus 1.5", "5 limits.memory 1 GB", "2 session.idle_timeout_seconds 60 s"]
        );
        assert!(said.environments.contains(&(
            "science".into(),
            Source::Artifact("/home/me/art/science".into()),
            6
        )));
        assert!(said.environments.contains(&("js".into(), Source::Preset(Language::Node), 8)));
        assert_eq!(said.tools, [("js".to_owned(), ToolSet::Code)]);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, message, hint) in [
            (
                "[limits]\nmemmory = 1",
                "carrel.toml:2: there is no setting `limits.memmory`",
                "did you mean `limits.memory`?",
            ),
            ("\n[limit]\nmemory = 1", "carrel.toml:2: there is no setting `limit`", "did you mean `limits`?"),
            ("[limits]\npids = \"many\"", "carrel.toml:2: `limits.pids` must be a whole number", ""),
            ("[limits]\ntimeout_seconds = 4000", "`4000` is more than the most, 3600 s", ""),
            ("[limits]\ntimeout_seconds = 0", "must be more than 0", ""),
            ("[limits]\ncpus = -1", "`-1` is not a number of CPUs", ""),
            ("limits = 3", "carrel.toml:1: `limits` must be a table", ""),
            ("[environments.a]\npreset = \"ruby\"", "no preset `ruby`", "presets: python, bash, node"),
            ("[environments.a]\ntools = \"cod\"", "`environments.a.tools`: there is no tool set `cod`", ""),
            (
                "[environments.a]\nprest = \"node\"",
                "carrel.toml:2: there is no setting `environments.a.prest`",
                "`preset`",
            ),
            ("[environments.a]\n", "says neither preset nor sandbox", ""),
            ("[limits\n", "carrel.toml:1: ", ""),
            ("[serve]\nlisten = \"x\"", "`serve.listen` must be an array of strings", ""),
            ("[serve]\nlisten = [\"x\"]", "`x` is not ADDRESS:PORT", ""),
            ("[serve]\nallow_origin = [\"https://x\"]", "no setting", "did you mean `serve.allow_origins`?"),
            ("[serve]\nallow_origins = [\"x\"]", "`x` does not begin with https://", ""),
            ("[telemetry]\notlp = \"x\"", "no setting `telemetry.otlp`", ""),
        ] {
            let problem = said(text).unwrap_err();
            assert_eq!(problem.code, Code::Config);
            assert!(problem.message.contains(message), "{text:?}: {}", problem.message);
            assert!(problem.hint.contains(hint), "{text:?}: {}", problem.hint);
        }
    }

    #[test]
    fn a_project_cannot_loosen_its_own_fence() {
        let text = "isolation = \"weak\"";
        assert!(said(text).is_ok());
        let problem = parse(Path::new("/src/p/carrel.toml"), text, Author::Project).unwrap_err();
        assert!(problem.message.contains("cannot be set by a project"), "{}", problem.message);
        let serves = "[serve]\nlisten = [\"0.0.0.0:80\"]\n";
        assert!(said(serves).is_ok());
        assert!(parse(Path::new("/src/p/carrel.toml"), serves, Author::Project).is_err());
        let problem =
            parse(Path::new("/tmp/carrel.toml"), "[project]\ndirectory = \"/etc\"", Author::Project)
                .unwrap_err();
        assert!(problem.message.contains("leads out of the project"), "{}", problem.message);
    }
}
